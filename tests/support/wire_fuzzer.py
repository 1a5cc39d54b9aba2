"""Coverage-guided fuzzer of everything that reads a peer's bytes.

`python -m tests.support.wire_fuzzer CORPUS -runs=N -seed=S`, with libFuzzer's own flags: it writes what honest
peers say into the folder CORPUS, and searches on from there. It ends with another status than 0 when an input makes
anything but a RemoteProtocolError. The first byte of an input chooses what reads the rest.
"""

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

INSTRUMENTED = ["prfaas.transport", "prfaas.errors", "prfaas.agent.transfer.open_body", "prfaas.kv.layout"]

with atheris.instrument_imports(include=INSTRUMENTED):
    from prfaas.agent.transfer import open_body
    from prfaas.errors import LayoutError, RemoteProtocolError
    from prfaas.kv.group import KVGroup
    from prfaas.kv.layout import Layout
    from prfaas.kv.parts import LayerSlice
    from prfaas.transport.codec.packing import CODECS, Packer, pack_formats
    from prfaas.transport.net import handshake
    from prfaas.transport.net.connection import Connection
    from prfaas.transport.protocol import messages
    from prfaas.transport.protocol.messages import ObjectSizes
    from prfaas.transport.protocol.wire import (
        HEADER_BYTES,
        ConnectionState,
        FrameType,
        Header,
        chunk_checksum,
        chunk_header,
        packed_header,
    )
    from prfaas.transport.ranges import Ranges, Slab
    from prfaas.transport.receiver.api import Acceptance, OpenRequest, Rejection
    from prfaas.transport.receiver.dispatcher import InboundDispatcher
    from prfaas.transport.receiver.reader import FrameQuota, Reader
    from prfaas.transport.sender.outbound_transfer import PeerState
    from prfaas.types import BlockHash, GroupBlocks, Shard

SIZES = ObjectSizes([(1000, 3), (70_000, 2)])
MAX_BYTES, MAX_OBJECTS = SIZES.total_bytes, 100  # Larger transfers are rejected.
PACKER, IDENTITY = Packer(), handshake.Identity("far", bytes(32))


@contextlib.contextmanager
def connected_to(data: bytes, *, state: ConnectionState) -> Iterator[Connection]:
    """Provide a connection whose peer sends this and closes."""
    local, remote = socket.socketpair()
    with remote, contextlib.closing(Connection(local, state=state)) as connection, contextlib.suppress(OSError):
        remote.sendall(data)
        remote.shutdown(socket.SHUT_WR)
        yield connection


def read_connection(data: bytes) -> None:
    """Read frames of an authenticated sender."""
    dispatcher = InboundDispatcher(accept=accept, on_event=lambda event: None, silence_seconds=60.0)
    with connected_to(data, state=ConnectionState.RECEIVING) as connection:
        Reader(dispatcher, connection, peer="peer", quota=FrameQuota()).run()


def read_stranger(data: bytes) -> None:
    """Read the handshake of a stranger."""
    with connected_to(data, state=ConnectionState.NEW) as connection:
        handshake.answer(connection, IDENTITY)


def accept(request: OpenRequest, reply: Callable[[Acceptance | Rejection], None]) -> None:
    """Accept small transfers. The second object is held already."""
    if request.object_bytes.total_bytes > MAX_BYTES or len(request.object_bytes) > MAX_OBJECTS:
        reply(Rejection("no_memory", "too long"))
        return
    memory = [memoryview(bytearray(size)) for size in request.object_bytes]
    reply(Acceptance(held=range(1, min(2, len(memory))), destination=memory.__getitem__))


def read_answers(data: bytes) -> None:
    """Read frames of a receiver."""
    header, payload = Header.decode(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), data[HEADER_BYTES:]
    if header.type is FrameType.HAVE:
        have = messages.decode_have(header, payload, num_objects=len(SIZES))
        standing = PeerState.of(have, SIZES)
        assert standing.arrived.num_bytes <= SIZES.total_bytes
    elif header.type is FrameType.DONE:
        messages.decode_done(payload)


def read_handshake(data: bytes) -> None:
    for decode in (messages.decode_hello, messages.decode_challenge, messages.decode_proof, messages.decode_ending):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


def read_packed(data: bytes) -> None:
    assert len(PACKER.unpack(data)) == struct.unpack_from("<I", data)[0]


def read_body(data: bytes) -> None:
    """Read the agents' own part of an OPEN."""
    for decode in (open_body.read_grant, open_body.OpenBody.decode):
        with contextlib.suppress(RemoteProtocolError, LayoutError):
            decode(data)


READERS = (read_connection, read_stranger, read_answers, read_handshake, read_packed, read_body)


def read(data: bytes) -> None:
    """Let a reader take the input. It may refuse with a RemoteProtocolError (a layout with a LayoutError) only."""
    if data:
        with contextlib.suppress(RemoteProtocolError):
            READERS[data[0] % len(READERS)](data[1:])


def good_inputs() -> list[bytes]:
    """Return frames of an honest peer, from which the search starts."""
    transfer_id, piece = bytes(range(16)), memoryview(bytes(1000))
    slab = Slab(0, 1, 0, 1000)
    opened = messages.Open(SIZES, 1, 5.0, b"body")
    have = messages.Have(Ranges([(1, 3)]), (Slab(0, 1, 0, 10),))
    packed = [packed for way in pack_formats(CODECS) if (packed := PACKER.pack(bytes(1000), way))]
    checksum = chunk_checksum(transfer_id, slab, [piece])
    frames = [
        chunk_header(transfer_id, slab, checksum) + piece,
        messages.encode_open(transfer_id, opened),
        Header(FrameType.END, 0, transfer_id, offset=5).encode(),
        messages.encode_ending(FrameType.CANCEL, transfer_id, messages.EndReason("cancelled", "why")),
        *(packed_header(transfer_id, slab, checksum, packed_bytes=len(content)) + content for content in packed),
    ]
    challenge = messages.Challenge("far", bytes(32), 1, ("lz4",), bytes(16), bytes(32))
    handshake_frames = [
        messages.encode_hello(messages.Hello("near", bytes(32), (1,), ("lz4",), transfer_id)),
        messages.encode_challenge(challenge),
        messages.encode_proof(bytes(32)),
    ]
    answers = [messages.encode_have(transfer_id, have), messages.encode_done(transfer_id, messages.TransferStats(5, 0))]
    layer = LayerSlice("a", 0, 100, "bfloat16", "head,token,kv_dim")
    layout = Layout("m", "", Shard(0, 1), (KVGroup("full_attention", 16, (layer,)),))
    groups = (GroupBlocks(0, 0, (BlockHash(bytes(16)),), BlockHash(bytes(16))),)
    body = open_body.OpenBody(b"grant", (layout.fingerprint,), (layout,), groups, trace="00-trace").encode()
    bodies = [body]
    hello, _, proof = handshake_frames
    bare = [frame[HEADER_BYTES:] for frame in handshake_frames]
    kinds = ([*frames, b"".join(frames)], [hello, hello + proof], answers, bare, packed, bodies)
    return [bytes([number]) + content for number, inputs in enumerate(kinds) for content in inputs]


if __name__ == "__main__":
    for number, good in enumerate(good_inputs()):
        (Path(sys.argv[1]) / f"good-{number}").write_bytes(good)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()

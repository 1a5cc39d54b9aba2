"""A coverage-guided fuzzer over everything that reads a peer's bytes.

`python -m tests.property.transport.wire_fuzzer CORPUS -runs=N -seed=S`, with libFuzzer's own flags: it writes what honest
peers say into the folder CORPUS, and searches on from there. It ends with another status than 0 when an input makes
anything but a RemoteProtocolError. The first byte of an input chooses what reads the rest.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path

import atheris

INSTRUMENTED = ["prfaas.transport", "prfaas.errors", "prfaas.agent.plan", "prfaas.cachepool.layout"]

with atheris.instrument_imports(include=INSTRUMENTED):
    from prfaas.agent import plan
    from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
    from prfaas.errors import LayoutError, RemoteProtocolError
    from prfaas.transport import lossy_cast, messages
    from prfaas.transport.area import Slab
    from prfaas.transport.assembler import Assembler
    from prfaas.transport.object_sizes import ObjectSizes
    from prfaas.transport.outbox import Standing
    from prfaas.transport.packing import CODECS, Packer, ways
    from prfaas.transport.ranges import Ranges
    from prfaas.transport.wire import (
        HEADER_BYTES,
        FrameType,
        Header,
        chunk_checksum,
        chunk_header,
        next_state,
        packed_header,
    )
    from prfaas.types import BlockHash, GroupBlocks, Shard

SIZES = ObjectSizes([(1000, 3), (70_000, 2)])
PACKER = Packer()


def read_connection(data: bytes) -> None:
    """Frames of a sender that has proven its name, as the receiving end reads them."""
    assembler, state = Assembler(SIZES, Ranges([(1, 2)])), "receiving"
    while len(data) >= HEADER_BYTES:
        header = Header.decode(data[:HEADER_BYTES])
        state = next_state(state, header.type)  # type: ignore[arg-type]
        payload, data = data[HEADER_BYTES : HEADER_BYTES + header.length], data[HEADER_BYTES + header.length :]
        if header.type is FrameType.CHUNK:
            read_chunk(assembler, header)
        elif header.type is FrameType.PACKED:
            raw = PACKER.unpack(payload)
            read_chunk(assembler, header.unpacked(len(raw)))
        elif header.type is FrameType.LOSSY:
            read_chunk(assembler, header.unpacked(read_lossy(payload)))
        elif header.type is FrameType.OPEN:
            messages.decode_open(header, payload)
        elif header.type in (FrameType.CANCEL, FrameType.ERROR):
            messages.decode_ending(payload)


def read_chunk(assembler: Assembler, header: Header) -> None:
    if assembler.use_of(header.slab) == "write":
        before = assembler.arrived.num_bytes
        assembler.landed(header.slab)
        assert before < assembler.arrived.num_bytes <= SIZES.total_bytes
        assert assembler.use_of(header.slab) == "discard"
        if header.checksum % 2:
            assembler.changed(header.slab)


def read_answers(data: bytes) -> None:
    """Frames of a receiver, as the sending end reads them."""
    header, payload = Header.decode(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), data[HEADER_BYTES:]
    if header.type is FrameType.HAVE:
        have = messages.decode_have(header, payload, num_objects=len(SIZES))
        standing = Standing.of(have, SIZES)
        assert standing.arrived.num_bytes <= SIZES.total_bytes
    elif header.type is FrameType.DONE:
        messages.decode_done(payload)


def read_handshake(data: bytes) -> None:
    for decode in (messages.decode_hello, messages.decode_challenge, messages.decode_proof, messages.decode_ending):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


def read_packed(data: bytes) -> None:
    assert len(PACKER.unpack(data)) == struct.unpack_from("<I", data)[0]


def read_lossy(data: bytes) -> int:
    num_bytes = lossy_cast.raw_bytes(data)
    assert len(lossy_cast.restore(data)) == num_bytes
    return num_bytes


def read_body(data: bytes) -> None:
    """The agents' own part of an OPEN."""
    for decode in (plan.grant_of, plan.OpenBody.decode, _read_probe, plan.decode_link_probe):
        with contextlib.suppress(RemoteProtocolError, LayoutError):
            decode(data)


def _read_probe(data: bytes) -> None:
    plan.read_layout(plan.probed_layout(data))


READERS = (read_connection, read_answers, read_handshake, read_packed, read_lossy, read_body)


def read(data: bytes) -> None:
    """Any reader may refuse with a RemoteProtocolError (a layout with a LayoutError), and with nothing else."""
    if data:
        with contextlib.suppress(RemoteProtocolError):
            READERS[data[0] % len(READERS)](data[1:])


def good_inputs() -> list[bytes]:
    """What an honest peer says: where the search starts."""
    transfer_id, piece = bytes(range(16)), memoryview(bytes(1000))
    slab = Slab(0, 1, 0, 1000)
    opened = messages.Open(SIZES, 1, 5.0, b"body")
    have = messages.Have(Ranges([(1, 3)]), (Slab(0, 1, 0, 10),))
    packed = [packed for way in ways(CODECS) if (packed := PACKER.pack(bytes(1000), way))]
    lossy = lossy_cast.cast(bytes(1000))
    assert lossy is not None
    checksum = chunk_checksum(transfer_id, slab, [piece])
    frames = [
        chunk_header(transfer_id, slab, checksum) + piece,
        messages.encode_open(transfer_id, opened),
        Header(FrameType.END, 0, transfer_id, offset=5).encode(),
        messages.encode_ending(FrameType.CANCEL, transfer_id, messages.Ending("cancelled", "why")),
        *(packed_header(transfer_id, slab, checksum, packed_bytes=len(its)) + its for its in packed),
        packed_header(transfer_id, slab, checksum, packed_bytes=len(lossy), kind=FrameType.LOSSY) + lossy,
    ]
    challenge = messages.Challenge("far", bytes(32), 1, ("lz4",), bytes(16), bytes(32))
    said = [
        messages.encode_hello(messages.Hello("near", bytes(32), (1,), ("lz4",), transfer_id)),
        messages.encode_challenge(challenge),
        messages.encode_proof(bytes(32)),
    ]
    answers = [messages.encode_have(transfer_id, have), messages.encode_done(transfer_id, messages.Done(5, 0))]
    layer = LayerSlice("a", 0, 100, "bfloat16", "head,token,kv_dim")
    layout = Layout("m", "", Shard(0, 1), (KVGroup("full_attention", 16, (layer,)),))
    groups = (GroupBlocks(0, 0, (BlockHash(bytes(16)),), BlockHash(bytes(16))),)
    body = plan.OpenBody(b"grant", (layout.fingerprint,), (layout,), groups, trace="00-trace").encode()
    bodies = [body, plan.encode_probe(layout), plan.encode_link_probe(b"grant")]
    kinds = ([*frames, b"".join(frames)], answers, [its[HEADER_BYTES:] for its in said], packed, [lossy], bodies)
    return [bytes([number]) + its for number, inputs in enumerate(kinds) for its in inputs]


if __name__ == "__main__":
    for number, good in enumerate(good_inputs()):
        (Path(sys.argv[1]) / f"good-{number}").write_bytes(good)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()

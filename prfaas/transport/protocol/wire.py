"""The bytes on the wire, version 1: frames of a 48-byte header and a payload (pure, holds no socket and no payload).

Theory of operation. A link is a set of TCP connections from a sending to a receiving agent. Each begins with a handshake
in which both sides prove that they know the secret, over fresh nonces; then frames of any transfer may cross any of them:

    sender (dials)                  receiver (listens)
    HELLO (name, nonce, versions)  ──▶
                               ◀──  CHALLENGE (name, nonce, version, boot id, proof)
    PROOF                      ──▶
                               ◀──  WELCOME
    OPEN (object sizes, body)  ──▶                    once per transfer, again when the receiver may have lost it
                               ◀──  HAVE (held objects, slabs received) | ERROR
    CHUNK, or PACKED or LOSSY  ──▶                    on any connection
                               ◀──  ACK (how many chunks of this connection) | AGAIN (which came changed)
    END (total)                ──▶                    every byte has been handed to a connection
                               ◀──  DONE              every byte is there
    CANCEL                     ──▶ ◀──                either side gives up
                               ◀──  REOPEN            a chunk of a transfer that is not open here, or no connection of one
                               ◀──  RATE              how much the link may send a second
    PING                       ──▶ ◀──  PONG          a silent connection is alive
    ERROR of no transfer       ──▶ ◀──                why whoever says it ends the connection

A chunk carries a *slab*: the bytes [offset, offset + length / count) of each of `count` consecutive objects, one after the
other. A layer's slices of many small blocks so travel in one frame, without a list of ranges.

Header, little-endian: magic 4, version 1, type 1, count 2, payload length 4, transfer id 16, object 4, offset 8, checksum of
a chunk 8. `docs/wire-format.md` has every field of every frame. Every length is checked against the limit of its
type, and every type against the state of its connection, before memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

import msgpack
import xxhash

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.ranges import Slab

MAGIC = b"PRFS"
VERSION = 1
_HEADER = struct.Struct("<4sBBHI16sIQQ")
HEADER_BYTES = _HEADER.size
CHECKSUM_AT = HEADER_BYTES - 8
NO_TRANSFER = bytes(16)


class FrameType(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    OPEN = 5
    HAVE = 6
    CHUNK = 7
    ACK = 8
    AGAIN = 9
    DONE = 10
    CANCEL = 11
    ERROR = 12
    PING = 13
    PONG = 14
    END = 15
    REOPEN = 16
    PACKED = 17
    LOSSY = 18
    RATE = 19


MAX_CHUNK_BYTES = 1 << 20
MAX_OBJECTS_PER_CHUNK = 512  # each is one entry of the kernel's scatter list, which holds 1024
_SMALL = 4 << 10
MAX_PAYLOAD_BYTES: dict[FrameType, int] = {
    FrameType.HELLO: _SMALL,
    FrameType.CHALLENGE: _SMALL,
    FrameType.PROOF: _SMALL,
    FrameType.WELCOME: _SMALL,
    FrameType.OPEN: 16 << 20,  # 1M tokens in blocks of 16 are 1 MiB of hashes a group
    FrameType.HAVE: 512 << 10,  # a bit for each of 2M objects, and 4096 slabs of up to 37 bytes
    FrameType.CHUNK: MAX_CHUNK_BYTES,
    FrameType.ACK: 0,
    FrameType.AGAIN: 0,
    FrameType.DONE: _SMALL,
    FrameType.CANCEL: _SMALL,
    FrameType.ERROR: _SMALL,
    FrameType.PING: 0,
    FrameType.PONG: 0,
    FrameType.END: 0,
    FrameType.REOPEN: 0,
    FrameType.PACKED: MAX_CHUNK_BYTES,
    FrameType.LOSSY: MAX_CHUNK_BYTES // 2 + 1,
    FrameType.RATE: 0,
}
_TYPES = {int(kind): kind for kind in FrameType}

State = Literal["hello", "challenge", "proof", "welcome", "sending", "receiving"]
_FROM_SENDER = (
    FrameType.OPEN,
    FrameType.CHUNK,
    FrameType.PACKED,
    FrameType.LOSSY,
    FrameType.END,
    FrameType.CANCEL,
    FrameType.ERROR,
    FrameType.PING,
)
_FROM_RECEIVER = (
    FrameType.HAVE,
    FrameType.ACK,
    FrameType.AGAIN,
    FrameType.DONE,
    FrameType.CANCEL,
    FrameType.ERROR,
    FrameType.REOPEN,
    FrameType.PONG,
    FrameType.RATE,
)
# What may come in each state of a connection, and the state that follows. The dialer waits for CHALLENGE and WELCOME,
# the listener for HELLO and PROOF. Anything else breaks the protocol. ERROR of no transfer ends a connection.
NEXT_STATE: dict[State, dict[FrameType, State]] = {
    "hello": {FrameType.HELLO: "proof"},
    "proof": {FrameType.PROOF: "receiving", FrameType.ERROR: "proof"},
    "challenge": {FrameType.CHALLENGE: "welcome", FrameType.ERROR: "challenge"},
    "welcome": {FrameType.WELCOME: "sending", FrameType.ERROR: "welcome"},
    "receiving": dict.fromkeys(_FROM_SENDER, "receiving"),
    "sending": dict.fromkeys(_FROM_RECEIVER, "sending"),
}


@dataclass(frozen=True)
class Header:
    """The head of one frame. `object`, `count`, `offset` and `checksum` are a chunk's; other frames say what theirs mean."""

    type: FrameType
    length: int
    transfer_id: bytes = NO_TRANSFER
    object: int = 0
    offset: int = 0
    checksum: int = 0
    count: int = 0

    def encode(self) -> bytes:
        """The 48 bytes.

        Raises:
            LocalProtocolError: the payload is longer than its type allows.
        """
        if self.length > MAX_PAYLOAD_BYTES[self.type]:
            raise LocalProtocolError(
                f"{self.type.name} of {self.length} bytes; the limit is {MAX_PAYLOAD_BYTES[self.type]}"
            )
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.type,
            self.count,
            self.length,
            self.transfer_id,
            self.object,
            self.offset,
            self.checksum,
        )

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Header:
        """The header in 48 bytes.

        Raises:
            RemoteProtocolError: magic, version, type, length or count is not of this protocol.
        """
        magic, version, number, count, length, transfer_id, index, offset, checksum = _HEADER.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError("magic", "this is no prfaas peer")
        if version != VERSION:
            raise RemoteProtocolError("version", f"wire version {version}; this side speaks version {VERSION}")
        kind = _TYPES.get(number)
        if kind is None:
            raise RemoteProtocolError("type", f"frame type {number} is unknown")
        if length > MAX_PAYLOAD_BYTES[kind]:
            raise RemoteProtocolError("length", f"{kind.name} of {length} bytes")
        if not _count_fits(kind, count, length):
            raise RemoteProtocolError("count", f"{kind.name} of {length} bytes over {count} objects")
        return Header(kind, length, transfer_id, index, offset, checksum, count)

    @property
    def slab(self) -> Slab:
        """What a CHUNK carries."""
        return Slab(self.object, self.count, self.offset, self.length // self.count)

    def unpacked(self, raw_bytes: int) -> Header:
        """The header of the CHUNK that a PACKED or LOSSY frame stands for, whose checksum it has.

        Raises:
            RemoteProtocolError: so many bytes are no such chunk.
        """
        if raw_bytes % self.count:
            raise RemoteProtocolError("count", f"{self.type.name}: {raw_bytes} bytes over {self.count} objects")
        return replace(self, type=FrameType.CHUNK, length=raw_bytes)


def _count_fits(kind: FrameType, count: int, length: int) -> bool:
    if kind in (FrameType.PACKED, FrameType.LOSSY):
        return 0 < count <= MAX_OBJECTS_PER_CHUNK and length > 0
    if kind is not FrameType.CHUNK:
        return count == 0
    return 0 < count <= MAX_OBJECTS_PER_CHUNK and length > 0 and length % count == 0


def next_state(state: State, kind: FrameType) -> State:
    """The state of a connection after a frame of this type came.

    Raises:
        RemoteProtocolError: it may not come now.
    """
    following = NEXT_STATE[state].get(kind)
    if following is None:
        raise RemoteProtocolError(
            "order", f"{kind.name} while waiting for {', '.join(k.name for k in NEXT_STATE[state])}"
        )
    return following


def chunk_header(transfer_id: bytes, slab: Slab, checksum: int) -> bytes:
    """The header of a CHUNK."""
    head = Header(FrameType.CHUNK, slab.num_bytes, transfer_id, slab.first, slab.offset, checksum, slab.num_objects)
    return head.encode()


def packed_header(
    transfer_id: bytes, slab: Slab, checksum: int, *, packed_bytes: int, kind: FrameType = FrameType.PACKED
) -> bytes:
    """The header of a PACKED or LOSSY frame; the checksum is that of the chunk as the receiver keeps it."""
    head = Header(kind, packed_bytes, transfer_id, slab.first, slab.offset, checksum, slab.num_objects)
    return head.encode()


def chunk_checksum(transfer_id: bytes, slab: Slab, views: Iterable[memoryview]) -> int:
    """XXH3-64 of a chunk's payload, seeded with that of its header before the checksum, so that it covers both.

    Each view is done with before the next is taken. Releases the interpreter lock for long ones.
    """
    seed = xxhash.xxh3_64_intdigest(chunk_header(transfer_id, slab, 0)[:CHECKSUM_AT])
    if isinstance(views, list) and len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for view in views:
        state.update(view)
    return state.intdigest()


def control(kind: FrameType, body: Any, *, transfer_id: bytes = NO_TRANSFER) -> bytes:
    """A whole control frame with a msgpack payload."""
    payload: bytes = msgpack.packb(body)
    return Header(kind, len(payload), transfer_id).encode() + payload

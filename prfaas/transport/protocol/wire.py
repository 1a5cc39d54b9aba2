"""Bytes on the wire, version 1: frames of a 48-byte header and a payload. Pure: no socket, no payload is kept.

A link is a set of TCP connections from a sending to a receiving agent. Each begins with a handshake, in which both
sides prove over fresh nonces that they know the secret. Then frames of any transfer may use any connection:

    sender (dials)                  receiver (listens)
    HELLO (name, nonce, versions)  ──▶
                               ◀──  CHALLENGE (name, nonce, version, boot id, proof)
    PROOF                      ──▶
                               ◀──  WELCOME
    OPEN (object sizes, body)  ──▶                    once per transfer, and again after lost connections
                               ◀──  HAVE (held objects, slabs received) | ERROR
    CHUNK or PACKED            ──▶                    on any connection
                               ◀──  ACK (number of chunks of this connection) | AGAIN (number of a corrupt chunk)
    END (total)                ──▶                    every byte has been handed to a connection
                               ◀──  DONE              every byte has arrived
    CANCEL                     ──▶ ◀──  ERROR         the sender, or the receiver, gives up
                               ◀──  REOPEN            a transfer is unknown, or has lost its connections
    PING                       ──▶ ◀──  PONG          proof that a silent connection is alive
    ERROR of no transfer       ──▶ ◀──                the reason for ending the connection

A chunk carries a slab: the bytes [offset, offset + length / count) of each of `count` consecutive objects. So the
slices that one layer has in many small blocks travel in one frame, without a list of ranges.

Header, little-endian: magic `PRFS` (4 bytes), version (1), type (1), count (2), payload length (4), transfer id (16),
first object (4), offset (8), checksum (8). `docs/wire-format.md` describes every field. Before memory is taken, every
length is checked against the limit of its frame type, and every frame type against the state of its connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import msgpack
import xxhash

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.state_machine import TransitionTable
from prfaas.transport.ranges import Slab

MAGIC = b"PRFS"
VERSION = 1
_HEADER = struct.Struct("<4sBBHI16sIQQ")
HEADER_BYTES = _HEADER.size
CHECKSUM_AT = HEADER_BYTES - 8
NO_TRANSFER = bytes(16)


class FrameType(IntEnum):
    """Type of a frame, as written in its header."""

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


MAX_CHUNK_BYTES = 1 << 20
MAX_OBJECTS_PER_CHUNK = 512  # Each is one entry of the kernel's scatter list, which holds 1024.
_SMALL = 4 << 10
MAX_PAYLOAD_BYTES: dict[FrameType, int] = dict.fromkeys(FrameType, 0) | {
    FrameType.HELLO: _SMALL,
    FrameType.CHALLENGE: _SMALL,
    FrameType.PROOF: _SMALL,
    FrameType.WELCOME: _SMALL,
    FrameType.OPEN: 16 << 20,  # 1M tokens in blocks of 16 are 1 MiB of hashes per group.
    FrameType.HAVE: 512 << 10,  # A bit for each of 2M objects, and 4096 slabs of up to 37 bytes.
    FrameType.CHUNK: MAX_CHUNK_BYTES,
    FrameType.DONE: _SMALL,
    FrameType.CANCEL: _SMALL,
    FrameType.ERROR: _SMALL,
    FrameType.PACKED: MAX_CHUNK_BYTES,
}
_TYPES = {int(kind): kind for kind in FrameType}


class ConnectionState(Enum):
    """State of one end of a connection: the awaited handshake frame, or whether this end sends or receives KV."""

    NEW = "new"
    AWAITING_HELLO = "awaiting HELLO"
    AWAITING_PROOF = "awaiting PROOF"
    AWAITING_CHALLENGE = "awaiting CHALLENGE"
    AWAITING_WELCOME = "awaiting WELCOME"
    SENDING = "sending"
    RECEIVING = "receiving"
    CLOSED = "closed"


class ConnectionStep(Enum):
    """Step of this end that changes the state of a connection, as received frames do."""

    DIAL = "send HELLO"
    LISTEN = "await HELLO"
    REVERSE = "let the dialler receive"
    CLOSE = "close the socket"


_FROM_SENDER = [FrameType[name] for name in ["OPEN", "CHUNK", "PACKED", "END", "CANCEL", "ERROR", "PING"]]
_FROM_RECEIVER = [FrameType[name] for name in ["HAVE", "ACK", "AGAIN", "DONE", "CANCEL", "ERROR", "REOPEN", "PONG"]]
# Received frames and own steps, by state. Any other frame breaks the protocol.
TRANSITIONS: TransitionTable[ConnectionState, FrameType | ConnectionStep] = TransitionTable(
    "connection",
    ConnectionState.NEW,
    {
        (ConnectionState.NEW, ConnectionStep.LISTEN): ConnectionState.AWAITING_HELLO,
        (ConnectionState.AWAITING_HELLO, FrameType.HELLO): ConnectionState.AWAITING_PROOF,
        (ConnectionState.AWAITING_PROOF, FrameType.PROOF): ConnectionState.RECEIVING,
        (ConnectionState.AWAITING_PROOF, FrameType.ERROR): ConnectionState.AWAITING_PROOF,
        (ConnectionState.RECEIVING, ConnectionStep.REVERSE): ConnectionState.SENDING,
        (ConnectionState.NEW, ConnectionStep.DIAL): ConnectionState.AWAITING_CHALLENGE,
        (ConnectionState.AWAITING_CHALLENGE, FrameType.CHALLENGE): ConnectionState.AWAITING_WELCOME,
        (ConnectionState.AWAITING_CHALLENGE, FrameType.ERROR): ConnectionState.AWAITING_CHALLENGE,
        (ConnectionState.AWAITING_WELCOME, FrameType.WELCOME): ConnectionState.SENDING,
        (ConnectionState.AWAITING_WELCOME, FrameType.ERROR): ConnectionState.AWAITING_WELCOME,
        (ConnectionState.SENDING, ConnectionStep.REVERSE): ConnectionState.RECEIVING,
        **{(ConnectionState.RECEIVING, frame_type): ConnectionState.RECEIVING for frame_type in _FROM_SENDER},
        **{(ConnectionState.SENDING, frame_type): ConnectionState.SENDING for frame_type in _FROM_RECEIVER},
        **{
            (state, ConnectionStep.CLOSE): ConnectionState.CLOSED for state in ConnectionState if state.name != "CLOSED"
        },
    },
)


@dataclass(frozen=True)
class Header:
    """Header of one frame. The meaning of `offset` depends on the type; `object`, `count` and `checksum` are a chunk's."""

    type: FrameType
    length: int
    transfer_id: bytes = NO_TRANSFER
    object: int = 0
    offset: int = 0
    checksum: int = 0
    count: int = 0

    def encode(self) -> bytes:
        """Return the 48 bytes.

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
        """Return the header in 48 bytes.

        Raises:
            RemoteProtocolError: magic, version, type, length or count is invalid.
        """
        magic, version, number, count, length, transfer_id, index, offset, checksum = _HEADER.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError("magic", "the peer does not speak this protocol")
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
        """Slab that a CHUNK carries."""
        return Slab(self.object, self.count, self.offset, self.length // self.count)

    def unpacked(self, raw_bytes: int) -> Header:
        """Return the header of the CHUNK that a PACKED frame replaces.

        Raises:
            RemoteProtocolError: the raw bytes do not divide evenly over the objects.
        """
        if raw_bytes % self.count:
            raise RemoteProtocolError("count", f"{self.type.name}: {raw_bytes} bytes over {self.count} objects")
        return replace(self, type=FrameType.CHUNK, length=raw_bytes)


def _count_fits(kind: FrameType, count: int, length: int) -> bool:
    if kind is FrameType.PACKED:
        return 0 < count <= MAX_OBJECTS_PER_CHUNK and length > 0
    if kind is not FrameType.CHUNK:
        return count == 0
    return 0 < count <= MAX_OBJECTS_PER_CHUNK and length > 0 and length % count == 0


def state_after(state: ConnectionState, frame_type: FrameType) -> ConnectionState:
    """Return the state of a connection after it has received a frame of this type.

    Raises:
        RemoteProtocolError: the state does not allow the frame.
    """
    following = TRANSITIONS.transitions.get((state, frame_type))
    if following is None:
        raise RemoteProtocolError("order", f"{frame_type.name} is not allowed while {state.value}")
    return following


def chunk_header(transfer_id: bytes, slab: Slab, checksum: int) -> bytes:
    """Return the header of a CHUNK."""
    head = Header(FrameType.CHUNK, slab.num_bytes, transfer_id, slab.first, slab.offset, checksum, slab.num_objects)
    return head.encode()


def packed_header(transfer_id: bytes, slab: Slab, checksum: int, *, packed_bytes: int) -> bytes:
    """Return the header of a PACKED frame, with the checksum of the unpacked chunk."""
    head = Header(FrameType.PACKED, packed_bytes, transfer_id, slab.first, slab.offset, checksum, slab.num_objects)
    return head.encode()


def chunk_checksum(transfer_id: bytes, slab: Slab, views: Sequence[memoryview]) -> int:
    """Return the XXH3-64 of a chunk's payload, seeded with that of the header fields, so that it covers both.

    Releases the interpreter lock for long views.
    """
    seed = xxhash.xxh3_64_intdigest(chunk_header(transfer_id, slab, 0)[:CHECKSUM_AT])
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for view in views:
        state.update(view)
    return state.intdigest()


def control(kind: FrameType, body: Any, *, transfer_id: bytes = NO_TRANSFER) -> bytes:
    """Return a complete control frame with a msgpack payload."""
    payload: bytes = msgpack.packb(body)
    return Header(kind, len(payload), transfer_id).encode() + payload

"""The bytes on the wire, version 1: frames of a 48-byte header and a payload (pure, holds no socket and no payload).

Theory of operation. A link is a set of TCP connections from a sending to a receiving agent. Each begins with a handshake
in which both sides prove that they know the secret, over fresh nonces; then frames of any transfer may cross any of them:

    sender                          receiver
    HELLO (name, nonce)        ──▶
                               ◀──  CHALLENGE (name, nonce, proof)
    PROOF                      ──▶
                               ◀──  WELCOME
    OPEN (body, object sizes)  ──▶                    once per transfer, again after all connections were lost
                               ◀──  HAVE (held objects, ranges received) | ERROR
    CHUNK (object, offset)     ──▶                    on any connection
                               ◀──  ACK (ranges) | AGAIN (range: its checksum did not match)
                               ◀──  DONE              every byte is there
    CANCEL                     ──▶ ◀──                either side gives up
    PING                       ──▶ ◀──  PONG          a silent connection is alive

Header, little-endian: magic 4, version 1, type 1, flags 2, payload length 4, transfer id 16, object 4, offset 8, xxh3-64 of a
chunk's payload 8. Control payloads are msgpack. Every length is checked against the limit of its type before memory is taken.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from prfaas.errors import LocalProtocolError, RemoteProtocolError

MAGIC = b"PRFS"
VERSION = 1
_HEADER = struct.Struct("<4sBBHI16sIQQ")
HEADER_BYTES = _HEADER.size
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


MAX_CHUNK_BYTES = 1 << 20
_SMALL = 4 << 10
MAX_PAYLOAD_BYTES: dict[FrameType, int] = {
    FrameType.HELLO: _SMALL,
    FrameType.CHALLENGE: _SMALL,
    FrameType.PROOF: _SMALL,
    FrameType.WELCOME: _SMALL,
    FrameType.OPEN: 16 << 20,  # 1M tokens in blocks of 16 are 1 MiB of hashes a group
    FrameType.HAVE: 4 << 20,
    FrameType.CHUNK: MAX_CHUNK_BYTES,
    FrameType.ACK: 64 << 10,
    FrameType.AGAIN: _SMALL,
    FrameType.DONE: _SMALL,
    FrameType.CANCEL: _SMALL,
    FrameType.ERROR: _SMALL,
    FrameType.PING: 0,
    FrameType.PONG: 0,
}


@dataclass(frozen=True)
class Header:
    """The head of one frame; `checksum` counts for CHUNK alone."""

    type: FrameType
    length: int
    transfer_id: bytes = NO_TRANSFER
    object: int = 0
    offset: int = 0
    checksum: int = 0

    def encode(self) -> bytes:
        if self.length > MAX_PAYLOAD_BYTES[self.type]:
            raise LocalProtocolError(
                f"{self.type.name} of {self.length} bytes; the limit is {MAX_PAYLOAD_BYTES[self.type]}"
            )
        return _HEADER.pack(
            MAGIC, VERSION, self.type, 0, self.length, self.transfer_id, self.object, self.offset, self.checksum
        )

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Header:
        """The header in 48 bytes.

        Raises:
            RemoteProtocolError: magic, version, type or length is not of this protocol.
        """
        magic, version, kind, flags, length, transfer_id, index, offset, checksum = _HEADER.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError("magic", "this is no prfaas peer")
        if version != VERSION or flags:
            raise RemoteProtocolError(
                "version", f"wire version {version}, flags {flags}; this side speaks version {VERSION}"
            )
        if kind not in FrameType.__members__.values():
            raise RemoteProtocolError("type", f"frame type {kind} is unknown")
        if length > MAX_PAYLOAD_BYTES[FrameType(kind)]:
            raise RemoteProtocolError("length", f"{FrameType(kind).name} of {length} bytes")
        return Header(FrameType(kind), length, transfer_id, index, offset, checksum)


def control(kind: FrameType, body: Any, *, transfer_id: bytes = NO_TRANSFER) -> bytes:
    """A whole control frame."""
    payload: bytes = msgpack.packb(body)
    return Header(kind, len(payload), transfer_id).encode() + payload

"""Filter that flips a byte of the first chunk each time that it passes."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header

TARGET_OBJECT = 0


def flip_byte_in_first_chunk() -> Callable[[bytes], bytes]:
    """Return a filter for the bytes of one connection, in pieces of any size."""
    return _ChunkCorrupter().filter


class _ChunkCorrupter:
    def __init__(self) -> None:
        self._head = bytearray()  # Incomplete header of the current frame.
        self._payload_left = 0
        self._is_victim = False

    def filter(self, data: bytes) -> bytes:
        changed = bytearray(data)
        at = 0
        while at < len(changed):
            at = self._read_payload(changed, at) if self._payload_left else self._read_header(changed, at)
        return bytes(changed)

    def _read_header(self, data: bytearray, at: int) -> int:
        taken = data[at : at + HEADER_BYTES - len(self._head)]
        self._head += taken
        if len(self._head) == HEADER_BYTES:
            header = Header.decode(self._head)
            self._payload_left = header.length
            self._is_victim = header.type is FrameType.CHUNK and header.object == TARGET_OBJECT and header.offset == 0
            self._head.clear()
        return at + len(taken)

    def _read_payload(self, data: bytearray, at: int) -> int:
        length = min(self._payload_left, len(data) - at)
        if self._is_victim:
            data[at] ^= 1
            self._is_victim = False
        self._payload_left -= length
        return at + length

"""Damage on the way: one byte of one chunk is flipped, each time that chunk passes."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header

DAMAGED_OBJECT = 0


def flip_byte_in_first_chunk() -> Callable[[bytes], bytes]:
    """A filter for one connection's bytes; it follows the frames, however they are cut."""
    return _Damage().change


class _Damage:
    def __init__(self) -> None:
        self._head = bytearray()  # of the frame whose header is not whole yet
        self._payload_left = 0
        self._is_victim = False

    def change(self, data: bytes) -> bytes:
        changed = bytearray(data)
        at = 0
        while at < len(changed):
            at = self._through_payload(changed, at) if self._payload_left else self._through_header(changed, at)
        return bytes(changed)

    def _through_header(self, data: bytearray, at: int) -> int:
        taken = data[at : at + HEADER_BYTES - len(self._head)]
        self._head += taken
        if len(self._head) == HEADER_BYTES:
            header = Header.decode(self._head)
            self._payload_left = header.length
            self._is_victim = header.type is FrameType.CHUNK and header.object == DAMAGED_OBJECT and header.offset == 0
            self._head.clear()
        return at + len(taken)

    def _through_payload(self, data: bytearray, at: int) -> int:
        length = min(self._payload_left, len(data) - at)
        if self._is_victim:
            data[at] ^= 1
            self._is_victim = False
        self._payload_left -= length
        return at + length

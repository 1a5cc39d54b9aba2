"""A chunk's bytes made shorter for the wire: byte planes, each compressed where that helps (pure).

Of 16-bit floats the high bytes (sign and exponent) repeat, the low ones are noise. So a chunk is taken apart into planes,
the bytes at i, i + width, i + 2 width and so on, and each plane travels compressed, or as it is where that is shorter. lz4 is
always there; zstd, which finds about twice as much in exponents, where the package `zstandard` is installed.

    raw bytes 4, codec 1, width 1, zero 2, bytes of each of four planes 4 each (0 beyond the width), the planes
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lz4.block

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES

zstandard: Any = importlib.import_module("zstandard") if importlib.util.find_spec("zstandard") else None
_HEAD = struct.Struct("<IBBH4I")
PACKED_HEAD_BYTES = _HEAD.size
WIDTHS = (1, 2, 4)
CODEC_NUMBERS = {"lz4": 1, "zstd": 2}
CODECS = tuple(name for name in CODEC_NUMBERS if name != "zstd" or zstandard is not None)  # that this side has
_CODEC_ERRORS: tuple[type[Exception], ...] = (ValueError, lz4.block.LZ4BlockError)
if zstandard is not None:
    _CODEC_ERRORS += (zstandard.ZstdError,)
ZSTD_LEVEL = 1  # of exponent planes 2.5 times at 0.5 GB/s a core; higher levels gain under 5 %
LEAST_GAIN = 0.97  # of its bytes: a plane that shrinks less travels as it is


class Way(NamedTuple):
    """How chunks are packed."""

    codec: str
    width: int


def ways(codecs: Sequence[str]) -> tuple[Way, ...]:
    """Every way of packing with these codecs."""
    return tuple(Way(codec, width) for codec in codecs for width in WIDTHS)


@dataclass(frozen=True)
class PackedHead:
    """What precedes the planes."""

    raw_bytes: int
    codec: str
    width: int
    plane_bytes: tuple[int, ...]


class Packer:
    """Packs and unpacks. Compressors keep state: one thread at a time."""

    def __init__(self) -> None:
        self._compress: dict[str, Callable[[bytes], bytes]] = {"lz4": _lz4_compress}
        self._decompress: dict[int, Callable[[memoryview, int], bytes]] = {1: _lz4_decompress}
        if zstandard is not None:
            self._compress["zstd"] = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress
            self._decompress[2] = _zstd_decompress(zstandard.ZstdDecompressor())

    def pack(self, raw: bytes, way: Way) -> bytes | None:
        """The payload of a PACKED frame, or None when it would not be shorter."""
        if not raw or len(raw) % way.width:
            return None
        planes = [self._shorter(raw[at :: way.width], way.codec) for at in range(way.width)]
        lengths = [len(plane) for plane in planes]
        if PACKED_HEAD_BYTES + sum(lengths) > LEAST_GAIN * len(raw):
            return None
        rest = [0] * (max(WIDTHS) - way.width)
        head = _HEAD.pack(len(raw), CODEC_NUMBERS[way.codec], way.width, 0, *lengths, *rest)
        return b"".join((head, *planes))

    def _shorter(self, plane: bytes, codec: str) -> bytes:
        packed = self._compress[codec](plane)
        return packed if len(packed) <= LEAST_GAIN * len(plane) else plane

    def unpack(self, payload: bytes | bytearray) -> bytes | bytearray:
        """The raw bytes.

        Raises:
            RemoteProtocolError: it is no packed chunk.
        """
        head, view, at = read_head(payload), memoryview(payload), PACKED_HEAD_BYTES
        if head.width == 1:
            return self._plane(view[at:], head)
        raw = bytearray(head.raw_bytes)
        for number, length in enumerate(head.plane_bytes):
            raw[number :: head.width] = self._plane(view[at : at + length], head)
            at += length
        return raw

    def _plane(self, packed: memoryview, head: PackedHead) -> bytes:
        expected = head.raw_bytes // head.width
        if len(packed) == expected:
            return bytes(packed)
        try:
            plane = self._decompress[CODEC_NUMBERS[head.codec]](packed, expected)
        except _CODEC_ERRORS as error:
            raise RemoteProtocolError("packing", f"{head.codec}: {error}") from error
        if len(plane) != expected:
            raise RemoteProtocolError("packing", f"a plane of {len(plane)} bytes in place of {expected}")
        return plane


def read_head(payload: bytes | bytearray) -> PackedHead:
    """What a PACKED frame's payload says of itself; every length is within bounds.

    Raises:
        RemoteProtocolError: it is no packed chunk, or of a codec that is not here.
    """
    if len(payload) < PACKED_HEAD_BYTES:
        raise RemoteProtocolError("packing", f"a packed chunk of {len(payload)} bytes")
    raw_bytes, number, width, zero, *lengths = _HEAD.unpack_from(payload)
    codec = next((name for name in CODECS if CODEC_NUMBERS[name] == number), None)
    if codec is None:
        raise RemoteProtocolError("packing", f"codec {number} is not known here")
    if width not in WIDTHS or zero or any(lengths[width:]):
        raise RemoteProtocolError("packing", f"{width} planes of {lengths} bytes")
    if not 0 < raw_bytes <= MAX_CHUNK_BYTES or raw_bytes % width:
        raise RemoteProtocolError("packing", f"{raw_bytes} bytes in {width} planes")
    used = tuple(lengths[:width])
    if max(used) > raw_bytes // width or PACKED_HEAD_BYTES + sum(used) != len(payload):
        raise RemoteProtocolError("packing", f"planes of {used} bytes in a frame of {len(payload)}")
    return PackedHead(raw_bytes, codec, width, used)


def _lz4_compress(plane: bytes) -> bytes:
    packed: bytes = lz4.block.compress(plane, store_size=False)
    return packed


def _lz4_decompress(packed: memoryview, num_bytes: int) -> bytes:
    plane: bytes = lz4.block.decompress(packed, uncompressed_size=num_bytes)
    return plane


def _zstd_decompress(decompressor: Any) -> Callable[[memoryview, int], bytes]:
    def decompress(packed: memoryview, num_bytes: int) -> bytes:
        """A frame that claims another size is refused before memory is taken."""
        claimed = zstandard.frame_content_size(packed)
        if claimed != num_bytes:
            raise ValueError(f"a frame of {claimed} bytes in place of {num_bytes}")
        plane: bytes = decompressor.decompress(packed, max_output_size=num_bytes)
        return plane

    return decompress

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
from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES
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


class PackFormat(NamedTuple):
    """How chunks are packed."""

    codec: str
    width: int


def pack_formats(codecs: Sequence[str]) -> tuple[PackFormat, ...]:
    """Every way of packing with these codecs."""
    return tuple(PackFormat(codec, width) for codec in codecs for width in WIDTHS)


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

    def pack(self, raw: bytes, way: PackFormat) -> bytes | None:
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


TRIAL_BYTES = 64 << 10  # of a chunk, packed in every way to see what that would bring
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 60.0
BEGIN_BELOW, END_ABOVE = 0.9, 0.97  # of the time that the same bytes take as they are
MAX_CPU_RATIO = 0.25  # of this host's processors, which have an engine to serve
SMOOTHING = 0.2  # weight of the latest chunk
WATCH_SECONDS = 1.0  # of a full link, over which the payload that arrives is compared


class PackingCost(NamedTuple):
    """What packing some bytes in one way took."""

    way: PackFormat
    raw_bytes: int
    packed_bytes: int
    seconds: float  # by the clock: other threads may have run meanwhile
    cpu_seconds: float  # of this thread


class LinkLoad(NamedTuple):
    """A link at one moment, as far as packing is concerned."""

    at: float  # seconds on a clock that only goes forward
    bytes_per_second: float  # that it carries, on the wire
    num_connections: int
    is_full: bool  # more is ready than the connections have taken
    acknowledged_bytes: int  # payload, unpacked, since the link's start


class _CostPerByte(NamedTuple):
    """Of one raw byte, in one way."""

    seconds: float
    cpu_seconds: float
    packed_bytes: float

    @staticmethod
    def of(sample: PackingCost) -> _CostPerByte:
        size = sample.raw_bytes
        return _CostPerByte(sample.seconds / size, sample.cpu_seconds / size, sample.packed_bytes / size)


class _Arrivals:
    """Payload that arrives in a second of a full link, measured over a second of it."""

    def __init__(self) -> None:
        self._last: LinkLoad | None = None
        self._seconds, self._bytes = 0.0, 0

    def add(self, pace: LinkLoad) -> float | None:
        """The rate, once in a second."""
        last, self._last = self._last, pace
        if last is None or not (last.is_full and pace.is_full):
            return None
        self._seconds += pace.at - last.at
        self._bytes += pace.acknowledged_bytes - last.acknowledged_bytes
        if self._seconds < WATCH_SECONDS:
            return None
        rate = self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        return rate


class PackingPolicy:
    """Takes the link's pace every few tens of milliseconds, and the samples of its connections."""

    def __init__(self, *, num_processors: int) -> None:
        self.way: PackFormat | None = None  # None: as they are
        self.saved_bytes = 0
        self._num_processors = num_processors
        self._pace = LinkLoad(0.0, 0.0, 1, is_full=False, acknowledged_bytes=0)
        self._arrivals = _Arrivals()
        self._plain_rate = 0.0  # payload a second that arrived unpacked; 0: not known
        self._cost = _CostPerByte(0.0, 0.0, 1.0)  # of the present way
        self._retry_at = 0.0
        self._patience = FIRST_RETRY_SECONDS

    @property
    def packed_ratio(self) -> float:
        """Bytes on the wire for each of payload, at present."""
        return 1.0 if self.way is None else self._cost.packed_bytes

    def observe(self, pace: LinkLoad) -> None:
        """Take the link's pace; stop packing when less arrives than before."""
        self._pace = pace
        rate = self._arrivals.add(pace)
        if rate is None:
            return
        if self.way is None:
            self._plain_rate = rate
        elif rate < self._plain_rate:
            self._stop()
        else:
            self._patience = FIRST_RETRY_SECONDS

    def wants_trial(self) -> bool:
        """Whether the next chunk's beginning should be packed in every way, to see."""
        pace = self._pace
        if self.way is not None or not pace.is_full or not self._plain_rate or pace.at < self._retry_at:
            return False
        self._retry_at = pace.at + self._patience
        return True

    def learn(self, samples: Sequence[PackingCost]) -> None:
        """Take what packing a chunk took, or what it would have taken in each way."""
        if len(samples) == 1:
            self._packed(samples[0])
        elif samples:
            self._tried(samples)

    def _tried(self, samples: Sequence[PackingCost]) -> None:
        gains = {sample: self._gain(_CostPerByte.of(sample)) for sample in samples}
        best = min(gains, key=gains.__getitem__)
        if gains[best] > BEGIN_BELOW:
            self._patience = min(2 * self._patience, MAX_RETRY_SECONDS)
            self._retry_at = self._pace.at + self._patience
        else:
            self.way, self._cost, self._arrivals = best.way, _CostPerByte.of(best), _Arrivals()

    def _packed(self, sample: PackingCost) -> None:
        """A chunk has been packed, or was found not to become shorter; stop when it has ceased to pay."""
        self.saved_bytes += sample.raw_bytes - sample.packed_bytes
        if sample.way != self.way:
            return
        latest = _CostPerByte.of(sample)
        self._cost = _CostPerByte(*(old + SMOOTHING * (new - old) for old, new in zip(self._cost, latest, strict=True)))
        if self._gain(self._cost) > END_ABOVE:
            self._stop()

    def _stop(self) -> None:
        self.way, self._arrivals, self._plain_rate = None, _Arrivals(), 0.0
        self._patience = min(4 * self._patience, MAX_RETRY_SECONDS)
        self._retry_at = self._pace.at + self._patience

    def _gain(self, cost: _CostPerByte) -> float:
        """The time of a chunk's way with packing, over that without; 2 where none is known, or processors are too few."""
        rate = self._pace.bytes_per_second if self._pace.num_connections else 0.0
        if not rate or rate / cost.packed_bytes * cost.cpu_seconds > MAX_CPU_RATIO * self._num_processors:
            return 2.0
        wire_seconds = self._pace.num_connections / rate  # a byte, on one of the connections
        plain = MAX_CHUNK_BYTES * wire_seconds
        hidden = min(MAX_CHUNK_BYTES * cost.packed_bytes, NOT_SENT_LOW_WATER_BYTES) * wire_seconds
        packing = MAX_CHUNK_BYTES * cost.seconds
        return (max(packing, hidden) + plain * cost.packed_bytes - hidden) / plain

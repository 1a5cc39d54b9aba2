"""Lossless packing of chunks, and the policy that decides when it pays (pure).

The high bytes of 16-bit floats (sign and exponent) repeat; the low bytes are noise. So a chunk is split into byte planes:
the bytes at i, i + width, i + 2 width and so on. Each plane travels compressed, or raw if that is shorter. lz4 is always
available. zstd compresses exponents about twice as well and needs the package `zstandard`.

Payload of a PACKED frame: raw bytes (4), codec (1), width (1), zero (2), lengths of four planes (4 each, 0 beyond the
width), planes.
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
CODECS = tuple(name for name in CODEC_NUMBERS if name != "zstd" or zstandard is not None)  # Codecs of this host.
_CODEC_ERRORS: tuple[type[Exception], ...] = (ValueError, lz4.block.LZ4BlockError)
if zstandard is not None:
    _CODEC_ERRORS += (zstandard.ZstdError,)
ZSTD_LEVEL = 1  # Shrinks exponent planes 2.5 times at 0.5 GB/s per core. Higher levels gain less than 5 %.
LEAST_GAIN = 0.97  # A plane that shrinks less travels raw.
TRIAL_BYTES = 64 << 10  # Beginning of a chunk that a trial packs in every format.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 60.0
BEGIN_BELOW, END_ABOVE = 0.9, 0.97  # Time of a packed chunk, relative to an unpacked one.
MAX_CPU_RATIO = 0.25  # Share of the host's processors, which also serve an engine.
SMOOTHING = 0.2  # Weight of the latest chunk.
ARRIVAL_SECONDS = 1.0  # Time of a full link over which arriving payload is compared.


class PackFormat(NamedTuple):
    """Codec and number of byte planes."""

    codec: str
    width: int


def pack_formats(codecs: Sequence[str]) -> tuple[PackFormat, ...]:
    """Return every pack format of these codecs."""
    return tuple(PackFormat(codec, width) for codec in codecs for width in WIDTHS)


@dataclass(frozen=True)
class PackedHead:
    """Header in front of the planes."""

    raw_bytes: int
    codec: str
    width: int
    plane_bytes: tuple[int, ...]


class Packer:
    """Packs and unpacks chunks. Compressors keep state, so each thread needs its own."""

    def __init__(self) -> None:
        self._compress: dict[str, Callable[[bytes], bytes]] = {
            "lz4": lambda plane: lz4.block.compress(plane, store_size=False)
        }
        self._decompress: dict[int, Callable[[memoryview, int], bytes]] = {
            1: lambda packed, num_bytes: lz4.block.decompress(packed, uncompressed_size=num_bytes)
        }
        if zstandard is not None:
            self._compress["zstd"] = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress
            self._decompress[2] = _zstd_decompress(zstandard.ZstdDecompressor())

    def pack(self, raw: bytes, pack_format: PackFormat) -> bytes | None:
        """Return the payload of a PACKED frame, or None if it would not be shorter."""
        codec, width = pack_format
        if not raw or len(raw) % width:
            return None
        planes = [self._shorter(raw[at::width], codec) for at in range(width)]
        lengths = [len(plane) for plane in planes]
        if PACKED_HEAD_BYTES + sum(lengths) > LEAST_GAIN * len(raw):
            return None
        rest = [0] * (max(WIDTHS) - width)
        head = _HEAD.pack(len(raw), CODEC_NUMBERS[codec], width, 0, *lengths, *rest)
        return b"".join((head, *planes))

    def _shorter(self, plane: bytes, codec: str) -> bytes:
        packed = self._compress[codec](plane)
        return packed if len(packed) <= LEAST_GAIN * len(plane) else plane

    def unpack(self, payload: bytes | bytearray) -> bytes | bytearray:
        """Return the raw bytes.

        Raises:
            RemoteProtocolError: the payload is not a packed chunk.
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
            raise RemoteProtocolError("packing", f"a plane has {len(plane)} bytes instead of {expected}")
        return plane


def read_head(payload: bytes | bytearray) -> PackedHead:
    """Return the header of a PACKED frame's payload. Every length is within bounds.

    Raises:
        RemoteProtocolError: the payload is not a packed chunk, or this host lacks the codec.
    """
    if len(payload) < PACKED_HEAD_BYTES:
        raise RemoteProtocolError("packing", f"a packed chunk of {len(payload)} bytes")
    raw_bytes, number, width, zero, *lengths = _HEAD.unpack_from(payload)
    codec = next((name for name in CODECS if CODEC_NUMBERS[name] == number), None)
    if codec is None:
        raise RemoteProtocolError("packing", f"codec {number} is unknown")
    if width not in WIDTHS or zero or any(lengths[width:]):
        raise RemoteProtocolError("packing", f"{width} planes of {lengths} bytes")
    if not 0 < raw_bytes <= MAX_CHUNK_BYTES or raw_bytes % width:
        raise RemoteProtocolError("packing", f"{raw_bytes} bytes in {width} planes")
    used = tuple(lengths[:width])
    if max(used) > raw_bytes // width or PACKED_HEAD_BYTES + sum(used) != len(payload):
        raise RemoteProtocolError("packing", f"planes of {used} bytes in a frame of {len(payload)}")
    return PackedHead(raw_bytes, codec, width, used)


def _zstd_decompress(decompressor: Any) -> Callable[[memoryview, int], bytes]:
    def decompress(packed: memoryview, num_bytes: int) -> bytes:
        """Decompress a frame. Rejects a frame that claims another size before memory is allocated."""
        claimed = zstandard.frame_content_size(packed)
        if claimed != num_bytes:
            raise ValueError(f"a frame claims {claimed} bytes instead of {num_bytes}")
        plane: bytes = decompressor.decompress(packed, max_output_size=num_bytes)
        return plane

    return decompress


class PackingCost(NamedTuple):
    """Measured cost of packing some bytes in one format."""

    format: PackFormat
    raw_bytes: int
    packed_bytes: int
    seconds: float  # Elapsed time, in which other threads may have run.
    cpu_seconds: float


class LinkLoad(NamedTuple):
    """Load of a link at one moment, as far as packing is concerned."""

    at: float
    bytes_per_second: float  # Rate estimate in bytes on the wire.
    num_connections: int
    is_full: bool  # More bytes are ready than the connections can send.
    acknowledged_bytes: int  # Total payload, unpacked.


class _CostPerByte(NamedTuple):
    """Cost of packing one raw byte."""

    seconds: float
    cpu_seconds: float
    packed_bytes: float

    @staticmethod
    def of(cost: PackingCost) -> _CostPerByte:
        num_bytes = cost.raw_bytes
        return _CostPerByte(cost.seconds / num_bytes, cost.cpu_seconds / num_bytes, cost.packed_bytes / num_bytes)


class _ArrivalRate:
    """Payload per second that arrives over a full link."""

    def __init__(self) -> None:
        self._last: LinkLoad | None = None
        self._seconds, self._bytes = 0.0, 0

    def add(self, load: LinkLoad) -> float | None:
        """Return the rate after each ARRIVAL_SECONDS of a full link, else None."""
        last, self._last = self._last, load
        if last is None or not (last.is_full and load.is_full):
            return None
        self._seconds += load.at - last.at
        self._bytes += load.acknowledged_bytes - last.acknowledged_bytes
        if self._seconds < ARRIVAL_SECONDS:
            return None
        rate = self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        return rate


class PackingPolicy:
    """Decides whether a link packs its chunks, and in which format.

    Packing pays if it saves more wire time than it costs. Part of the cost is hidden, because the kernel still sends the
    previous chunk meanwhile. The decision follows three measurements:

    - trials of every format on the beginning of a chunk, now and then while the link is full;
    - the cost of each packed chunk, which grows when processors are busy;
    - the payload that arrives, which must not fall below that without packing.

    A link that fails one of these stops packing, and tries again after an ever longer while.
    """

    def __init__(self, *, num_processors: int) -> None:
        self.format: PackFormat | None = None
        self.saved_bytes = 0
        self._num_processors = num_processors
        self._load = LinkLoad(0.0, 0.0, 1, is_full=False, acknowledged_bytes=0)
        self._arrivals = _ArrivalRate()
        self._plain_rate = 0.0  # Payload per second that arrived unpacked; 0 if unknown.
        self._cost = _CostPerByte(0.0, 0.0, 1.0)  # Cost of the present format.
        self._retry_at = 0.0
        self._patience = FIRST_RETRY_SECONDS

    @property
    def packed_ratio(self) -> float:
        """Bytes on the wire per byte of payload at present."""
        return 1.0 if self.format is None else self._cost.packed_bytes

    def observe(self, load: LinkLoad) -> None:
        """Take the link's load, every few tens of milliseconds. Stops packing if less arrives than without."""
        self._load = load
        rate = self._arrivals.add(load)
        if rate is None:
            return
        if self.format is None:
            self._plain_rate = rate
        elif rate < self._plain_rate:
            self._stop()
        else:
            self._patience = FIRST_RETRY_SECONDS

    def wants_trial(self) -> bool:
        """Return whether to try every format on the next chunk's beginning."""
        load = self._load
        if self.format is not None or not load.is_full or not self._plain_rate or load.at < self._retry_at:
            return False
        self._retry_at = load.at + self._patience
        return True

    def learn(self, costs: Sequence[PackingCost]) -> None:
        """Take the cost of a packed chunk, or the costs of a trial."""
        if len(costs) == 1:
            self._learn_chunk(costs[0])
        elif costs:
            self._learn_trial(costs)

    def _learn_trial(self, costs: Sequence[PackingCost]) -> None:
        ratios = {cost: self._time_ratio(_CostPerByte.of(cost)) for cost in costs}
        best = min(ratios, key=ratios.__getitem__)
        if ratios[best] > BEGIN_BELOW:
            self._patience = min(2 * self._patience, MAX_RETRY_SECONDS)
            self._retry_at = self._load.at + self._patience
        else:
            self.format, self._cost, self._arrivals = best.format, _CostPerByte.of(best), _ArrivalRate()

    def _learn_chunk(self, cost: PackingCost) -> None:
        """Take the cost of a chunk, which may not have become shorter. Stops packing if it no longer pays."""
        self.saved_bytes += cost.raw_bytes - cost.packed_bytes
        if cost.format != self.format:
            return
        latest = _CostPerByte.of(cost)
        self._cost = _CostPerByte(*(old + SMOOTHING * (new - old) for old, new in zip(self._cost, latest, strict=True)))
        if self._time_ratio(self._cost) > END_ABOVE:
            self._stop()

    def _stop(self) -> None:
        self.format, self._arrivals, self._plain_rate = None, _ArrivalRate(), 0.0
        self._patience = min(4 * self._patience, MAX_RETRY_SECONDS)
        self._retry_at = self._load.at + self._patience

    def _time_ratio(self, cost: _CostPerByte) -> float:
        """Return the time of a packed chunk relative to an unpacked one; 2 without a rate or without processors."""
        rate = self._load.bytes_per_second if self._load.num_connections else 0.0
        if not rate or rate / cost.packed_bytes * cost.cpu_seconds > MAX_CPU_RATIO * self._num_processors:
            return 2.0
        wire_seconds = self._load.num_connections / rate  # Time of one byte on one connection.
        plain = MAX_CHUNK_BYTES * wire_seconds
        hidden = min(MAX_CHUNK_BYTES * cost.packed_bytes, NOT_SENT_LOW_WATER_BYTES) * wire_seconds
        packing = MAX_CHUNK_BYTES * cost.seconds
        return (max(packing, hidden) + plain * cost.packed_bytes - hidden) / plain

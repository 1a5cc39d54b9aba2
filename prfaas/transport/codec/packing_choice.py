"""Whether a link's chunks are packed at present, and how (pure).

Packing pays where the wire time that it saves is more than the time it takes, which is partly hidden: while a connection's
thread packs a chunk, the kernel still has some of the one before to send. So the choice follows three measurements: the time
and the bytes of every way on the beginning of a chunk that leaves, taken now and then while the link is full; the time of each
chunk that was packed, which grows when processors are short; and the payload that arrives in all, which must not fall below
what arrived without. A link that fails one of these sends chunks as they are, and tries again after an ever longer while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.transport.codec.packing import Way
from prfaas.transport.congestion.connection_count import NOT_SENT_LOW_WATER_BYTES
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES

TRIAL_BYTES = 64 << 10  # of a chunk, packed in every way to see what that would bring
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 60.0
BEGIN_BELOW, END_ABOVE = 0.9, 0.97  # of the time that the same bytes take as they are
MAX_CPU_RATIO = 0.25  # of this host's processors, which have an engine to serve
SMOOTHING = 0.2  # weight of the latest chunk
WATCH_SECONDS = 1.0  # of a full link, over which the payload that arrives is compared


class PackSample(NamedTuple):
    """What packing some bytes in one way took."""

    way: Way
    raw_bytes: int
    packed_bytes: int
    seconds: float  # by the clock: other threads may have run meanwhile
    cpu_seconds: float  # of this thread


class LinkPace(NamedTuple):
    """A link at one moment, as far as packing is concerned."""

    at: float  # seconds on a clock that only goes forward
    bytes_per_second: float  # that it carries, on the wire
    num_connections: int
    is_full: bool  # more is ready than the connections have taken
    acknowledged_bytes: int  # payload, unpacked, since the link's start


class _Cost(NamedTuple):
    """Of one raw byte, in one way."""

    seconds: float
    cpu_seconds: float
    packed_bytes: float

    @staticmethod
    def of(sample: PackSample) -> _Cost:
        size = sample.raw_bytes
        return _Cost(sample.seconds / size, sample.cpu_seconds / size, sample.packed_bytes / size)


class _Arrivals:
    """Payload that arrives in a second of a full link, measured over a second of it."""

    def __init__(self) -> None:
        self._last: LinkPace | None = None
        self._seconds, self._bytes = 0.0, 0

    def add(self, pace: LinkPace) -> float | None:
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


class PackingChoice:
    """Takes the link's pace every few tens of milliseconds, and the samples of its connections."""

    def __init__(self, *, num_processors: int) -> None:
        self.way: Way | None = None  # None: as they are
        self.saved_bytes = 0
        self._num_processors = num_processors
        self._pace = LinkPace(0.0, 0.0, 1, is_full=False, acknowledged_bytes=0)
        self._arrivals = _Arrivals()
        self._plain_rate = 0.0  # payload a second that arrived unpacked; 0: not known
        self._cost = _Cost(0.0, 0.0, 1.0)  # of the present way
        self._retry_at = 0.0
        self._patience = FIRST_RETRY_SECONDS

    @property
    def packed_ratio(self) -> float:
        """Bytes on the wire for each of payload, at present."""
        return 1.0 if self.way is None else self._cost.packed_bytes

    def observe(self, pace: LinkPace) -> None:
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

    def learn(self, samples: Sequence[PackSample]) -> None:
        """Take what packing a chunk took, or what it would have taken in each way."""
        if len(samples) == 1:
            self._packed(samples[0])
        elif samples:
            self._tried(samples)

    def _tried(self, samples: Sequence[PackSample]) -> None:
        gains = {sample: self._gain(_Cost.of(sample)) for sample in samples}
        best = min(gains, key=gains.__getitem__)
        if gains[best] > BEGIN_BELOW:
            self._patience = min(2 * self._patience, MAX_RETRY_SECONDS)
            self._retry_at = self._pace.at + self._patience
        else:
            self.way, self._cost, self._arrivals = best.way, _Cost.of(best), _Arrivals()

    def _packed(self, sample: PackSample) -> None:
        """A chunk has been packed, or was found not to become shorter; stop when it has ceased to pay."""
        self.saved_bytes += sample.raw_bytes - sample.packed_bytes
        if sample.way != self.way:
            return
        latest = _Cost.of(sample)
        self._cost = _Cost(*(old + SMOOTHING * (new - old) for old, new in zip(self._cost, latest, strict=True)))
        if self._gain(self._cost) > END_ABOVE:
            self._stop()

    def _stop(self) -> None:
        self.way, self._arrivals, self._plain_rate = None, _Arrivals(), 0.0
        self._patience = min(4 * self._patience, MAX_RETRY_SECONDS)
        self._retry_at = self._pace.at + self._patience

    def _gain(self, cost: _Cost) -> float:
        """The time of a chunk's way with packing, over that without; 2 where none is known, or processors are too few."""
        rate = self._pace.bytes_per_second if self._pace.num_connections else 0.0
        if not rate or rate / cost.packed_bytes * cost.cpu_seconds > MAX_CPU_RATIO * self._num_processors:
            return 2.0
        wire_seconds = self._pace.num_connections / rate  # a byte, on one of the connections
        plain = MAX_CHUNK_BYTES * wire_seconds
        hidden = min(MAX_CHUNK_BYTES * cost.packed_bytes, NOT_SENT_LOW_WATER_BYTES) * wire_seconds
        packing = MAX_CHUNK_BYTES * cost.seconds
        return (max(packing, hidden) + plain * cost.packed_bytes - hidden) / plain

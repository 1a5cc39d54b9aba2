"""What leaves next: ready slabs of several transfers, cut into chunks, shared fairly by priority (pure).

Start-time fair queueing: each transfer has a virtual time that advances by bytes / weight as it is served, and the one
furthest behind is next. A priority step is a factor of 16 in weight, so that an urgent transfer takes nearly the whole link
and the others still move. Within a transfer bytes leave in the order in which they became ready, which is layer by layer.

The chunk size follows the backlog and the rate: large chunks cost less work per byte, small ones at the end let all connections
finish together, and those of a slow link are acknowledged in time. Powers of two keep the two sides' areas in few columns.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES, MAX_OBJECTS_PER_CHUNK
from prfaas.transport.ranges import Slab

MIN_CHUNK_BYTES = 128 << 10
SLOW_CHUNK_BYTES = 64 << 10  # the least on a slow link
# On its connection: what is more urgent waits for the chunk that each is sending, and a peer that says nothing within one is
# gone after 15 s. Measured at 100 Mbit/s and 40 ms: 1 MiB beside bulk takes 3.1 times its time alone, with 2 s 5.6 times.
CHUNK_SECONDS = 0.1
CHUNKS_PER_CONNECTION = 4  # the backlog is cut into at least so many chunks per connection
WEIGHT_STEP = 16.0
MAX_PRIORITY = 7


@dataclass(frozen=True)
class ChunkSize:
    """The most that a chunk has, while much waits, and why, for the log."""

    num_bytes: int
    reason: str


def chunk_size(*, bytes_per_second: float) -> ChunkSize:
    """For connections that carry so much each; infinity while that is not known."""
    if math.isinf(bytes_per_second):
        return ChunkSize(MAX_CHUNK_BYTES, "it is not known what a connection carries")
    in_time = int(min(MAX_CHUNK_BYTES, max(SLOW_CHUNK_BYTES, CHUNK_SECONDS * bytes_per_second)))
    why = f"a connection carries {bytes_per_second / 1e6:.1f} MB/s, for {CHUNK_SECONDS} s of which there is a least and a most"
    return ChunkSize(1 << in_time.bit_length() - 1, why)


@dataclass(frozen=True)
class Chunk:
    """What one frame carries."""

    transfer_id: bytes
    slab: Slab


@dataclass(eq=False)
class _Flow:
    transfer_id: bytes
    weight: float
    virtual_time: float = 0.0
    slabs: deque[Slab] = field(default_factory=deque)
    entry: int = -1  # its valid entry of the backlog; others are stale


class Chunker:
    """The work queue of one link."""

    def __init__(self, num_connections: int = 1) -> None:
        self.num_connections = num_connections
        self.size = chunk_size(bytes_per_second=math.inf)
        self.queued_bytes = 0
        self._flows: dict[bytes, _Flow] = {}
        self._backlog: list[tuple[float, int, _Flow]] = []  # flows that have slabs, by virtual time
        self._order = itertools.count()
        self._virtual_time = 0.0  # of the flow served last

    def add(self, transfer_id: bytes, *, priority: int) -> None:
        """A transfer may have slabs from here on; a lower `priority` is more urgent."""
        self._flows[transfer_id] = _Flow(transfer_id, _weight(priority))

    def prioritise(self, transfer_id: bytes, priority: int) -> None:
        """From here on a transfer counts as this urgent: what it was given as another does not count against it."""
        flow = self._flows.get(transfer_id)
        if flow is None:
            return
        flow.weight, flow.virtual_time = _weight(priority), self._virtual_time
        if flow.slabs:
            self._push(flow)

    def clear(self, transfer_id: bytes) -> None:
        """Forget what a transfer has queued."""
        flow = self._flows.get(transfer_id)
        if flow is not None:
            self.queued_bytes -= sum(slab.num_bytes for slab in flow.slabs)
            flow.slabs.clear()

    def remove(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        self.clear(transfer_id)
        self._flows.pop(transfer_id, None)
        if not self._flows:
            self._backlog.clear()  # of stale entries

    def has_work(self) -> bool:
        return self.queued_bytes > 0

    def is_drained(self, transfer_id: bytes) -> bool:
        """Whether a transfer has nothing queued."""
        return not self._flows[transfer_id].slabs

    def ready(self, transfer_id: bytes, slab: Slab) -> None:
        """These bytes may leave, after those that were ready before."""
        flow = self._flows[transfer_id]
        if flow.slabs and (merged := _merged(flow.slabs[-1], slab)) is not None:
            flow.slabs[-1] = merged
        else:
            flow.slabs.append(slab)
            self._enter(flow)
        self.queued_bytes += slab.num_bytes

    def put_back(self, chunk: Chunk) -> None:
        """A chunk that was taken and did not arrive leaves again, first of its transfer."""
        flow = self._flows.get(chunk.transfer_id)
        if flow is None:
            return
        flow.slabs.appendleft(chunk.slab)
        self._enter(flow)
        self.queued_bytes += chunk.slab.num_bytes

    def take(self) -> Chunk | None:
        """The next chunk, or None when nothing is ready."""
        while self._backlog:
            time, entry, flow = heapq.heappop(self._backlog)
            if not flow.slabs or flow.entry != entry:
                continue
            self._virtual_time = time
            slab, rest = _cut(flow.slabs.popleft(), self._chunk_bytes())
            flow.slabs.extendleft(reversed(rest))
            flow.virtual_time = time + slab.num_bytes / flow.weight
            self.queued_bytes -= slab.num_bytes
            if flow.slabs:
                self._push(flow)
            return Chunk(flow.transfer_id, slab)
        return None

    def _enter(self, flow: _Flow) -> None:
        """Join the backlog with the first slab, not ahead of those who have waited."""
        if len(flow.slabs) == 1:
            flow.virtual_time = max(flow.virtual_time, self._virtual_time)
            self._push(flow)

    def _push(self, flow: _Flow) -> None:
        flow.entry = next(self._order)
        heapq.heappush(self._backlog, (flow.virtual_time, flow.entry, flow))

    def _chunk_bytes(self) -> int:
        share = max(MIN_CHUNK_BYTES, self.queued_bytes // (CHUNKS_PER_CONNECTION * self.num_connections))
        return min(self.size.num_bytes, 1 << share.bit_length() - 1)


def _weight(priority: int) -> float:
    return WEIGHT_STEP ** -min(max(priority, 0), MAX_PRIORITY)


def _merged(last: Slab, new: Slab) -> Slab | None:
    """Both as one slab, when they are adjacent."""
    if (last.offset, last.length) == (new.offset, new.length) and last.last == new.first:
        return Slab(last.first, last.num_objects + new.num_objects, last.offset, last.length)
    same_objects = (last.first, last.num_objects) == (new.first, new.num_objects)
    if same_objects and last.end == new.offset and last.length + new.length <= MAX_CHUNK_BYTES:
        return Slab(last.first, last.num_objects, last.offset, last.length + new.length)
    return None


def _cut(slab: Slab, chunk_bytes: int) -> tuple[Slab, list[Slab]]:
    """The first chunk of a slab, and what is left of it in order."""
    if slab.length > chunk_bytes:
        taken = Slab(slab.first, 1, slab.offset, chunk_bytes)
        rest = [Slab(slab.first, 1, slab.offset + chunk_bytes, slab.length - chunk_bytes)]
    else:
        count = min(slab.num_objects, chunk_bytes // slab.length, MAX_OBJECTS_PER_CHUNK)
        taken, rest = Slab(slab.first, count, slab.offset, slab.length), []
    if taken.last < slab.last:
        rest.append(Slab(taken.last, slab.last - taken.last, slab.offset, slab.length))
    return taken, rest

"""Chunker of a link: cuts the ready bytes of several transfers into chunks and shares the link by priority (pure).

Start-time fair queueing: a transfer's virtual time advances by bytes / weight when it is served, and the transfer with the
lowest virtual time is next. A priority step is a factor of 16 in weight. An urgent transfer takes nearly the whole link, and
the others still move. Within a transfer bytes leave in the order in which they became ready, which is layer by layer.

The chunk size follows the backlog and the rate. Large chunks cost less work per byte. Small chunks at the end let all
connections finish together, and on a slow link they are acknowledged in time. Powers of two keep the areas of both ends in
few columns.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES, MAX_OBJECTS_PER_CHUNK
from prfaas.transport.ranges import Slab

MIN_CHUNK_BYTES = 128 << 10
SLOW_CHUNK_BYTES = 64 << 10  # Smallest chunk on a slow link.
# An urgent transfer waits for the chunk that each connection is sending, and a peer that is silent for 15 s counts as lost.
# Measured at 100 Mbit/s and 40 ms: 1 MiB during a bulk transfer takes 3.1 times as long as alone. With chunks of 2 s it
# takes 5.6 times as long.
CHUNK_SECONDS = 0.1
CHUNKS_PER_CONNECTION = 4  # The backlog is cut into at least this many chunks per connection.
WEIGHT_STEP = 16.0
MAX_PRIORITY = 7


def max_chunk_bytes(bytes_per_second: float) -> int:
    """Return the chunk size for the rate of one connection; infinity if the rate is unknown."""
    in_time = min(MAX_CHUNK_BYTES, max(SLOW_CHUNK_BYTES, CHUNK_SECONDS * bytes_per_second))
    return 1 << int(in_time).bit_length() - 1


@dataclass(frozen=True)
class Chunk:
    """Slab of a transfer that travels in one frame."""

    transfer_id: bytes
    slab: Slab


@dataclass(eq=False)
class _Flow:
    transfer_id: bytes
    weight: float
    virtual_time: float = 0.0
    slabs: deque[Slab] = field(default_factory=deque)
    entry: int = -1  # Number of the valid backlog entry. Earlier entries are stale.


class Chunker:
    """Work queue of one link."""

    def __init__(self, num_connections: int = 1) -> None:
        self.num_connections = num_connections
        self.max_chunk_bytes = MAX_CHUNK_BYTES
        self.queued_bytes = 0
        self._flows: dict[bytes, _Flow] = {}
        self._backlog: list[tuple[float, int, _Flow]] = []  # Heap of flows that have slabs, by virtual time.
        self._order = itertools.count()
        self._virtual_time = 0.0  # Virtual time of the flow served last.

    def add(self, transfer_id: bytes, *, priority: int) -> None:
        """Add a transfer. A lower `priority` is more urgent."""
        self._flows[transfer_id] = _Flow(transfer_id, _weight(priority))

    def prioritise(self, transfer_id: bytes, priority: int) -> None:
        """Change the priority of a transfer. What it received earlier does not count against it."""
        flow = self._flows.get(transfer_id)
        if flow is None:
            return
        flow.weight, flow.virtual_time = _weight(priority), self._virtual_time
        if flow.slabs:
            self._push(flow)

    def clear(self, transfer_id: bytes) -> None:
        """Forget the queued slabs of a transfer."""
        flow = self._flows.get(transfer_id)
        if flow is not None:
            self.queued_bytes -= sum(slab.num_bytes for slab in flow.slabs)
            flow.slabs.clear()

    def remove(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        self.clear(transfer_id)
        self._flows.pop(transfer_id, None)
        if not self._flows:
            # Only stale entries are left.
            self._backlog.clear()

    def has_work(self) -> bool:
        return self.queued_bytes > 0

    def is_drained(self, transfer_id: bytes) -> bool:
        """Return whether a transfer has nothing queued."""
        return not self._flows[transfer_id].slabs

    def ready(self, transfer_id: bytes, slab: Slab) -> None:
        """Queue bytes of a transfer behind its earlier ones."""
        flow = self._flows[transfer_id]
        if flow.slabs and (merged := _merged(flow.slabs[-1], slab)) is not None:
            flow.slabs[-1] = merged
        else:
            flow.slabs.append(slab)
            self._enter(flow)
        self.queued_bytes += slab.num_bytes

    def put_back(self, chunk: Chunk) -> None:
        """Queue a chunk that did not arrive in front of the transfer's other bytes."""
        flow = self._flows.get(chunk.transfer_id)
        if flow is None:
            return
        flow.slabs.appendleft(chunk.slab)
        self._enter(flow)
        self.queued_bytes += chunk.slab.num_bytes

    def take(self) -> Chunk | None:
        """Take the next chunk, or return None if nothing is ready."""
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
        """Put a flow that had no slabs into the backlog, but not ahead of flows that have waited."""
        if len(flow.slabs) == 1:
            flow.virtual_time = max(flow.virtual_time, self._virtual_time)
            self._push(flow)

    def _push(self, flow: _Flow) -> None:
        flow.entry = next(self._order)
        heapq.heappush(self._backlog, (flow.virtual_time, flow.entry, flow))

    def _chunk_bytes(self) -> int:
        share = max(MIN_CHUNK_BYTES, self.queued_bytes // (CHUNKS_PER_CONNECTION * self.num_connections))
        return min(self.max_chunk_bytes, 1 << share.bit_length() - 1)


def _weight(priority: int) -> float:
    return WEIGHT_STEP ** -min(max(priority, 0), MAX_PRIORITY)


def _merged(last: Slab, new: Slab) -> Slab | None:
    """Return two adjacent slabs as one, or None if they are not adjacent."""
    if (last.offset, last.length) == (new.offset, new.length) and last.last == new.first:
        return Slab(last.first, last.num_objects + new.num_objects, last.offset, last.length)
    same_objects = (last.first, last.num_objects) == (new.first, new.num_objects)
    if same_objects and last.end == new.offset and last.length + new.length <= MAX_CHUNK_BYTES:
        return Slab(last.first, last.num_objects, last.offset, last.length + new.length)
    return None


def _cut(slab: Slab, chunk_bytes: int) -> tuple[Slab, list[Slab]]:
    """Return the first chunk of a slab and the rest in order."""
    if slab.length > chunk_bytes:
        chunk = Slab(slab.first, 1, slab.offset, chunk_bytes)
        rest = [Slab(slab.first, 1, slab.offset + chunk_bytes, slab.length - chunk_bytes)]
    else:
        count = min(slab.num_objects, chunk_bytes // slab.length, MAX_OBJECTS_PER_CHUNK)
        chunk, rest = Slab(slab.first, count, slab.offset, slab.length), []
    if chunk.last < slab.last:
        rest.append(Slab(chunk.last, slab.last - chunk.last, slab.offset, slab.length))
    return chunk, rest

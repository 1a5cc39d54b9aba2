"""Chunker of a link: cuts the ready bytes of several transfers into chunks and shares the link (pure).

The transfers of one tenant and priority form a class. Classes share the link by weight, and the transfers of a class share
its part equally, so that a tenant with many transfers does not starve another tenant. A class weighs as much as its tenant,
and a priority step is a factor of 16. An urgent transfer takes nearly the whole link, and the others still move.

Both levels are start-time fair queues: an entry's virtual time advances by bytes / weight when it is served, and the entry
with the lowest virtual time is next. Within a transfer bytes leave in the order in which they became ready, which is layer
by layer.

The chunk size follows the backlog and the rate. Large chunks cost less work per byte. Small chunks at the end let all
connections finish together, and on a slow link they are acknowledged in time. Powers of two keep the areas of both ends in
few columns.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES, MAX_OBJECTS_PER_CHUNK
from prfaas.transport.ranges import Slab

MIN_CHUNK_BYTES = 128 << 10
SLOW_CHUNK_BYTES = 64 << 10  # Smallest chunk on a slow link.
# An urgent transfer waits for the chunk that each connection is sending, and a connection silent for 15 s is closed.
# Measured at 100 Mbit/s and 40 ms: 1 MiB during a bulk transfer takes 3.1 times as long as alone. With chunks of 2 s it
# takes 5.6 times as long.
CHUNK_SECONDS = 0.1
CHUNKS_PER_CONNECTION = 4  # The backlog of a class is cut into at least this many chunks per connection.
WEIGHT_STEP = 16.0
# A short prompt of a tenant without others in progress makes up for its wait in the queue of the path.
HEAD_START_BYTES = 4 << 20
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
class _Entry:
    """Entry of a fair queue."""

    weight: float = 1.0
    virtual_time: float = 0.0
    number: int = -1  # Of its valid item in the queue. Earlier items are stale.
    queued_bytes: int = 0


E = TypeVar("E", bound=_Entry)


class _FairQueue(Generic[E]):
    """Start-time fair queue of entries with queued bytes."""

    _numbers = itertools.count()  # Over all queues, since an entry may change its queue.

    def __init__(self, *, head_start_bytes: int = 0) -> None:
        """An entry that comes back may be ahead by as much time as the entry served last needs for `head_start_bytes`."""
        self._head_start_bytes = head_start_bytes
        self._items: list[tuple[float, int, E]] = []  # Heap by virtual time.
        self._virtual_time, self._weight = 0.0, 1.0  # Of the entry served last.

    def enter(self, entry: E) -> None:
        """Add an entry that had nothing queued. It gets no credit for its absence beyond the head start."""
        earliest = self._virtual_time - self._head_start_bytes / self._weight
        entry.virtual_time = max(entry.virtual_time, earliest)
        self._push(entry)

    def take(self) -> E | None:
        """Take the entry that is next. `served` must follow."""
        while self._items:
            time, number, entry = heapq.heappop(self._items)
            if entry.queued_bytes and entry.number == number:
                self._virtual_time, self._weight = time, entry.weight
                return entry
        return None

    def served(self, entry: E, num_bytes: int) -> None:
        """Charge an entry for its bytes, and add it again if it has more."""
        entry.virtual_time += num_bytes / entry.weight
        if entry.queued_bytes:
            self._push(entry)

    def _push(self, entry: E) -> None:
        entry.number = next(self._numbers)
        heapq.heappush(self._items, (entry.virtual_time, entry.number, entry))


@dataclass(eq=False)
class _Class(_Entry):
    """Transfers of one tenant and priority."""

    flows: _FairQueue[_Flow] = field(default_factory=lambda: _FairQueue())
    num_flows: int = 0


@dataclass(eq=False)
class _Flow(_Entry):
    """Ready bytes of one transfer."""

    transfer_id: bytes = b""
    tenant: str = ""
    priority: int = 0
    slabs: deque[Slab] = field(default_factory=deque)


class Chunker:
    """Work queue of one link."""

    def __init__(self, num_connections: int = 1, *, weight_of: Callable[[str], float] = lambda tenant: 1.0) -> None:
        """`weight_of` returns the weight of a tenant."""
        self.num_connections = num_connections
        self.max_chunk_bytes = MAX_CHUNK_BYTES
        self.queued_bytes = 0
        self._weight_of = weight_of
        self._flows: dict[bytes, _Flow] = {}
        self._classes: dict[tuple[int, str], _Class] = {}
        self._queue: _FairQueue[_Class] = _FairQueue(head_start_bytes=HEAD_START_BYTES)

    def add(self, transfer_id: bytes, *, priority: int, tenant: str = "") -> None:
        """Add a transfer. A lower `priority` is more urgent."""
        flow = _Flow(transfer_id=transfer_id, tenant=tenant, priority=priority)
        self._flows[transfer_id] = flow
        self._enter_class(flow)

    def clear(self, transfer_id: bytes) -> None:
        """Forget the queued slabs of a transfer."""
        flow = self._flows.get(transfer_id)
        if flow is not None:
            self._count(flow, -flow.queued_bytes)
            flow.slabs.clear()

    def remove(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        self.clear(transfer_id)
        flow = self._flows.pop(transfer_id, None)
        if flow is not None:
            self._leave_class(flow)

    def _class_of(self, flow: _Flow) -> _Class:
        return self._classes[flow.priority, flow.tenant]

    def _enter_class(self, flow: _Flow) -> None:
        key = flow.priority, flow.tenant
        if key not in self._classes:
            self._classes[key] = _Class(weight=_weight(flow.priority) * self._weight_of(flow.tenant))
        self._classes[key].num_flows += 1

    def _leave_class(self, flow: _Flow) -> None:
        flow_class = self._class_of(flow)
        flow_class.num_flows -= 1
        if not flow_class.num_flows:
            del self._classes[flow.priority, flow.tenant]

    def _count(self, flow: _Flow, num_bytes: int) -> None:
        """Add to the queued bytes of a transfer, of its class and of the link."""
        flow.queued_bytes += num_bytes
        self._class_of(flow).queued_bytes += num_bytes
        self.queued_bytes += num_bytes

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
        self._add(flow, slab.num_bytes)

    def put_back(self, chunk: Chunk) -> None:
        """Queue a chunk that did not arrive in front of the transfer's other bytes."""
        flow = self._flows.get(chunk.transfer_id)
        if flow is not None:
            flow.slabs.appendleft(chunk.slab)
            self._add(flow, chunk.slab.num_bytes)

    def take(self) -> Chunk | None:
        """Take the next chunk, or return None if nothing is ready."""
        flow_class = self._queue.take()
        flow = flow_class.flows.take() if flow_class is not None else None
        if flow_class is None or flow is None:
            return None
        slab, rest = _cut(flow.slabs.popleft(), self._chunk_bytes(flow_class))
        flow.slabs.extendleft(reversed(rest))
        self._count(flow, -slab.num_bytes)
        flow_class.flows.served(flow, slab.num_bytes)
        self._queue.served(flow_class, slab.num_bytes)
        return Chunk(flow.transfer_id, slab)

    def _add(self, flow: _Flow, num_bytes: int) -> None:
        flow_class = self._class_of(flow)
        had_flow_bytes, had_class_bytes = bool(flow.queued_bytes), bool(flow_class.queued_bytes)
        self._count(flow, num_bytes)
        if not had_flow_bytes:
            flow_class.flows.enter(flow)
        if not had_class_bytes:
            self._queue.enter(flow_class)

    def _chunk_bytes(self, flow_class: _Class) -> int:
        share = max(MIN_CHUNK_BYTES, flow_class.queued_bytes // (CHUNKS_PER_CONNECTION * self.num_connections))
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

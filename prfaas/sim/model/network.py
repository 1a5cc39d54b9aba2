"""Simulated network: the egress of a cluster, and transfers of KV over it."""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any

from prfaas.scheduler.hedge import InboundProgress
from prfaas.sim.kernel.meter import Meter
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest

Arrived = Callable[[Any], None]
# Relative error of a moment in seconds as a float, with a margin.
_ROUNDING = 1e-12


class Egress:
    """Shared way out of one cluster, which carries at most `bytes_per_second`. All flows have equal shares.

    `busy` counts seconds in which anything flowed, `sent` bytes including flows that have not ended.
    """

    def __init__(self, timeline: Timeline, bytes_per_second: float, *, rtt_seconds: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.busy = Meter()
        self.sent = Meter()
        self._timeline = timeline
        self._full_rate = bytes_per_second
        self._delay_seconds = 0.5 * rtt_seconds
        self._shares: list[float] = []
        # Start of the present time without any rate.
        self._down_since = math.inf
        self._moved_at = 0.0
        # Bytes that a flow present from the start would have sent: a flow of S bytes that joins at v ends at v + S.
        self._served = 0.0
        # Heap of (value of `_served` at its end, order, callback, argument).
        self._flows: list[tuple[float, int, Arrived, Any]] = []
        self._num_flows = 0
        # Ends of flows that were planned at an earlier version are void.
        self._version = 0

    def send(self, num_bytes: float, arrived: Arrived, argument: Any) -> None:
        """Send a flow and call `arrived(argument)` half a round trip after its last byte has left."""
        if math.isinf(self.bytes_per_second):
            self.sent.add(self._timeline.now, self._timeline.now, num_bytes)
            self._timeline.at(self._timeline.now + self._delay_seconds, arrived, argument)
            return
        self._move()
        self._num_flows += 1
        heapq.heappush(self._flows, (self._served + num_bytes, self._num_flows, arrived, argument))
        self._plan_next_end()

    @property
    def is_limited(self) -> bool:
        """Return whether the full rate is finite."""
        return math.isfinite(self._full_rate)

    @property
    def is_down(self) -> bool:
        """Return whether a change leaves no rate at all."""
        return 0.0 in self._shares

    def begin_change(self, share: float) -> None:
        """Reduce the rate to a share of itself; several changes multiply. At 0 flows wait."""
        self._shares.append(share)
        if not share:
            self._down_since = min(self._down_since, self._timeline.now)
        self._set_rate()

    def end_change(self, share: float) -> None:
        """End a change that began with this share."""
        self._shares.remove(share)
        if not self.is_down:
            self._down_since = math.inf
        self._set_rate()

    def _set_rate(self) -> None:
        self._move()
        self.bytes_per_second = math.prod(self._shares, start=self._full_rate)
        self._plan_next_end()

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Abandon the flows whose argument is unwanted."""
        self._move()
        self._flows = [flow for flow in self._flows if not is_unwanted(flow[3])]
        heapq.heapify(self._flows)
        self._plan_next_end()

    @property
    def down_seconds(self) -> float:
        """Return for how long the egress has had no rate; 0 while it has one."""
        return max(0.0, self._timeline.now - self._down_since)

    def bytes_left(self, argument: Any) -> float:
        """Return the bytes of the flows with this argument that have not left."""
        self._move()
        return math.fsum(flow[0] - self._served for flow in self._flows if flow[3] is argument)

    def queued_bytes(self) -> float:
        """Return the bytes that have entered and not left."""
        self._move()
        return math.fsum(flow[0] - self._served for flow in self._flows)

    @property
    def _flow_rate(self) -> float:
        return self.bytes_per_second / len(self._flows)

    def _move(self) -> None:
        """Advance all flows to now."""
        before, self._moved_at = self._moved_at, self._timeline.now
        passed = self._moved_at - before
        if passed and self.bytes_per_second and self._flows:
            self.busy.add(before, self._moved_at, passed)
            self.sent.add(before, self._moved_at, self.bytes_per_second * passed)
            self._served += self._flow_rate * passed

    def _plan_next_end(self) -> None:
        self._version += 1
        if self._flows and self.bytes_per_second:
            after = (self._flows[0][0] - self._served) / self._flow_rate
            self._timeline.at(self._timeline.now + max(after, 0.0), self._end_flows, self._version)

    def _end_flows(self, version: int) -> None:
        if version != self._version:
            return
        self._move()
        slack = self._flow_rate * _ROUNDING * (1.0 + self._timeline.now)
        while self._flows and self._flows[0][0] <= self._served + slack:
            _, _, arrived, argument = heapq.heappop(self._flows)
            self._timeline.at(self._timeline.now + self._delay_seconds, arrived, argument)
        if not self._flows:
            self._served = 0.0
        self._plan_next_end()


# A link as fast as the prefill falls behind by at most one piece of this many.
_NUM_PIECES = 8


class Transfers:
    """KV transfers over one egress. With `num_layers` above 1, KV leaves while prefill computes.

    Layers then leave in a few pieces, each when its last layer is computed. The pieces become smaller towards the end,
    and the last layer leaves alone at the end of the prefill.
    """

    def __init__(
        self,
        timeline: Timeline,
        egress: Egress,
        *,
        num_layers: int,
        is_wanted: Callable[[SimulatedRequest], bool] = lambda _: True,
    ) -> None:
        self._is_wanted = is_wanted
        self._timeline, self._egress = timeline, egress
        self._pieces = list(_pieces(num_layers))
        # Start, total and unsent bytes of each transfer that has not arrived.
        self._active: dict[SimulatedRequest, tuple[float, float, float]] = {}

    def start(
        self,
        request: SimulatedRequest,
        num_bytes: float,
        *,
        prefill_seconds: float,
        arrived: Callable[[SimulatedRequest], None],
    ) -> None:
        """Send KV during a prefill that starts now, and call `arrived(request)` when all bytes have arrived.

        A piece does not leave if `is_wanted` denies its request when it is due.
        """
        left = [len(self._pieces)]
        self._active[request] = self._timeline.now, num_bytes, num_bytes

        def piece_arrived(request: SimulatedRequest) -> None:
            left[0] -= 1
            if not left[0]:
                self._active.pop(request, None)
                arrived(request)

        for moment, share in self._pieces:
            due = self._timeline.now + moment * prefill_seconds
            self._timeline.at(due, self._send, (request, share * num_bytes, piece_arrived))

    def _send(self, piece: tuple[SimulatedRequest, float, Callable[[SimulatedRequest], None]]) -> None:
        request, num_bytes, arrived = piece
        if self._is_wanted(request):
            started_at, total_bytes, unsent_bytes = self._active[request]
            self._active[request] = started_at, total_bytes, unsent_bytes - num_bytes
            self._egress.send(num_bytes, arrived, request)
        else:
            self._active.pop(request, None)

    def progress(self, request: SimulatedRequest, *, waited_seconds: float) -> InboundProgress:
        """Return what has arrived of a request's KV."""
        # A sender opens its transfer at once, unless its link has been down for the whole wait.
        is_open = request in self._active or waited_seconds > self._egress.down_seconds
        started_at, total_bytes, unsent_bytes = self._active.get(request, (self._timeline.now, 0.0, 0.0))
        missing_bytes = unsent_bytes + self._egress.bytes_left(request)
        flowing_seconds = self._timeline.now - started_at
        paused_seconds = waited_seconds if missing_bytes >= total_bytes else self._egress.down_seconds
        return InboundProgress(waited_seconds, total_bytes, missing_bytes, flowing_seconds, paused_seconds, is_open)


def _pieces(num_layers: int) -> Iterator[tuple[float, float]]:
    """Yield (share of the prefill after which it leaves, share of the bytes) of equal pieces, the last one halved on."""
    piece, sent = -(-num_layers // _NUM_PIECES), 0
    while sent < num_layers:
        left = num_layers - sent
        layers = piece if left > piece else max(1, left // 2)
        sent += layers
        yield sent / num_layers, layers / num_layers

"""What TCP carries over a long path that loses packets: the share of the link's rate that is left to KV."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.sim.kernel.meter import Meter
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest

CongestionControl = Literal["bbr", "cubic"]
_SEGMENT_BYTES = 1448
# Mean window of AIMD that falls to 0.7 at each loss, in segments times the root of the loss: sqrt((1 + 0.7) / (2 (1 - 0.7))).
# Linux' cubic over emulated paths has 0.89 to 1.30 times as much (30 ms and 0.01 %: 75 Mbit/s a connection; 80 ms and
# 0.1 %: 10 Mbit/s; 40 ms and 0.05 %: 20 Mbit/s).
_WINDOW = 1.683


@dataclass(frozen=True)
class LossyPath:
    """A path of this round trip that loses this share of packets, by chance and one by one, with so many connections."""

    rtt_seconds: float = 0.0
    loss_ratio: float = 0.0
    num_connections: int = 8
    congestion_control: CongestionControl = "bbr"

    def carried(self, bytes_per_second: float) -> float:
        """Payload per second over a link of this rate: what is lost is sent twice; cubic takes each loss for a queue."""
        return min(bytes_per_second * (1.0 - self.loss_ratio), self._window_rate())

    def _window_rate(self) -> float:
        if self.congestion_control == "bbr" or not self.loss_ratio or not self.rtt_seconds:
            return math.inf
        window = _WINDOW / math.sqrt(self.loss_ratio) * _SEGMENT_BYTES
        return self.num_connections * window / self.rtt_seconds


Arrived = Callable[[Any], None]
_ROUNDING = 1e-12  # what a moment in seconds, as a float, may be wrong by, relative to itself, with room to spare


class SimulatedLink:
    """One path. `served` is how many bytes each flow that was there all along would have sent: a flow of S bytes that
    joined at `served` = v is done at v + S. `bytes_in` were handed to it, `bytes_out` have left it (of a flow that is not
    done, once it is)."""

    def __init__(self, rate: float, rtt_seconds: float) -> None:
        self.rate = rate
        self.rtt_seconds = rtt_seconds
        self.bytes_in = 0.0
        self.bytes_out = 0.0
        self.served = 0.0
        self.flow_rate = 0.0
        self.flows: list[tuple[float, int, float, Arrived, Any]] = []  # heap by the `served` at which each is done


class Egress:
    """All links that leave one cluster, which together carry at most `bytes_per_second`.

    The capacity is shared max-min fairly between links by their number of flows, and equally between the flows of a link.
    """

    def __init__(self, timeline: Timeline, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.busy = Meter()  # seconds in which anything flowed
        self.sent = Meter()  # bytes, also of flows that are not done
        self.bytes_dropped = 0.0  # of flows that were given up, what had not left
        self.links: list[SimulatedLink] = []
        self._timeline = timeline
        self._moved_at = 0.0
        self._sent = 0
        self._wake = 0

    def link(self, bytes_per_second: float, *, rtt_seconds: float = 0.0) -> SimulatedLink:
        """Return a further link."""
        self.links.append(SimulatedLink(bytes_per_second, rtt_seconds))
        return self.links[-1]

    def send(self, link: SimulatedLink, num_bytes: float, arrived: Arrived, argument: Any) -> None:
        """Put a flow on a link; `arrived(argument)` half an RTT after its last byte was sent."""
        link.bytes_in += num_bytes
        if math.isinf(min(link.rate, self.bytes_per_second)):
            link.bytes_out += num_bytes
            self.sent.add(self._timeline.now, self._timeline.now, num_bytes)
            self._timeline.at(self._timeline.now + 0.5 * link.rtt_seconds, arrived, argument)
            return
        self._move()
        self._sent += 1
        heapq.heappush(link.flows, (link.served + num_bytes, self._sent, num_bytes, arrived, argument))
        self._share()

    def set_rate(self, bytes_per_second: float) -> None:
        """Carry so much together from here on; 0: nothing, and what is under way waits."""
        self._move()
        self.bytes_per_second = bytes_per_second
        self._share()

    def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Give up the flows whose argument nobody waits for any more."""
        self._move()
        for link in self.links:
            for done_at, _, num_bytes, _, argument in link.flows:
                if is_unwanted(argument):
                    left = done_at - link.served
                    link.bytes_out += num_bytes - left
                    self.bytes_dropped += left
            link.flows = [flow for flow in link.flows if not is_unwanted(flow[4])]
            heapq.heapify(link.flows)
        self._share()

    def queued_bytes(self) -> float:
        """What has been handed over and has not left yet."""
        self._move()
        return math.fsum(flow[0] - link.served for link in self.links for flow in link.flows)

    def _move(self) -> None:
        """Let the flows send until now."""
        before, self._moved_at = self._moved_at, self._timeline.now
        passed = self._moved_at - before
        if passed and self.bytes_per_second and any(link.flows for link in self.links):
            self.busy.add(before, self._moved_at, passed)
            rate = sum(link.flow_rate * len(link.flows) for link in self.links)
            self.sent.add(before, self._moved_at, rate * passed)
            for link in self.links:
                link.served += link.flow_rate * passed

    def _share(self) -> None:
        """Give each link its rate, and wake when the next flow is done."""
        left, active = self.bytes_per_second, [link for link in self.links if link.flows]
        num_flows = sum(len(link.flows) for link in active)
        for link in sorted(active, key=lambda one: one.rate / len(one.flows)):
            link.flow_rate = min(link.rate / len(link.flows), left / num_flows)
            left -= link.flow_rate * len(link.flows)
            num_flows -= len(link.flows)
        self._wake += 1
        if active and self.bytes_per_second:
            after = min((link.flows[0][0] - link.served) / link.flow_rate for link in active)
            self._timeline.at(self._timeline.now + max(after, 0.0), self._done, self._wake)

    def _done(self, wake: int) -> None:
        if wake != self._wake:  # the flows have changed since
            return
        self._move()
        for link in self.links:
            self._release(link)
        self._share()

    def _release(self, link: SimulatedLink) -> None:
        slack = link.flow_rate * _ROUNDING * (1.0 + self._timeline.now)
        while link.flows and link.flows[0][0] <= link.served + slack:
            _, _, num_bytes, arrived, argument = heapq.heappop(link.flows)
            link.bytes_out += num_bytes
            self._timeline.at(self._timeline.now + 0.5 * link.rtt_seconds, arrived, argument)
        if not link.flows:
            link.served = 0.0

    @property
    def bytes_out(self) -> float:
        """What has left over all links."""
        return math.fsum(link.bytes_out for link in self.links)


_EIGHTHS = 8  # a link as fast as the prefill falls behind by one of them at most


class Transfers:
    """Sends prompts' KV over one link. With `num_layers` above 1 the KV leaves while it is computed.

    The early layers then go in a few pieces, each when its last layer is computed, ever smaller ones towards the end;
    the last layer goes alone, at the prefill's end.
    """

    def __init__(
        self,
        timeline: Timeline,
        egress: Egress,
        link: SimulatedLink,
        *,
        num_layers: int,
        is_wanted: Callable[[SimulatedRequest], bool] = lambda _: True,
    ) -> None:
        self._is_wanted = is_wanted
        self._timeline, self._egress, self._link = timeline, egress, link
        self._pieces = list(_pieces(num_layers))

    def start(
        self,
        request: SimulatedRequest,
        num_bytes: float,
        *,
        prefill_seconds: float,
        arrived: Callable[[SimulatedRequest], None],
    ) -> None:
        """The prefill starts now and takes so long; `arrived(request)` once every byte is there.

        A piece that is due when `is_wanted` denies its request does not leave.
        """
        left = [len(self._pieces)]

        def one_arrived(request: SimulatedRequest) -> None:
            left[0] -= 1
            if not left[0]:
                arrived(request)

        for moment, share in self._pieces:
            self._timeline.at(
                self._timeline.now + moment * prefill_seconds, self._send, (request, share * num_bytes, one_arrived)
            )

    def _send(self, piece: tuple[SimulatedRequest, float, Callable[[SimulatedRequest], None]]) -> None:
        request, num_bytes, arrived = piece
        if self._is_wanted(request):
            self._egress.send(self._link, num_bytes, arrived, request)


def _pieces(num_layers: int) -> Iterator[tuple[float, float]]:
    """(when it is computed, as a share of the prefill; its share of the bytes): eighths, the last one halved and halved."""
    eighth, sent = -(-num_layers // _EIGHTHS), 0
    while sent < num_layers:
        left = num_layers - sent
        layers = eighth if left > eighth else max(1, left // 2)
        sent += layers
        yield sent / num_layers, layers / num_layers

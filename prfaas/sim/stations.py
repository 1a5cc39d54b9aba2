"""Twin of stations: prefill instances, egress and decode slots, with one event per request and stage.

At most one PrfaaS cluster serves one PD cluster. A decode instance is BS_max slots, each as slow as in a full batch, as
in the throughput model. `scheduler.threshold` decides where a request is prefilled.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from prfaas.errors import ConfigError
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.scheduler.threshold import prefill_site
from prfaas.sim.builder import threshold_tokens
from prfaas.sim.kernel.meter import Load, Meter
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.network import Egress, Transfers
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario

Started = Callable[[SimulatedRequest, float], None]
Ended = Callable[[SimulatedRequest], None]


class Station:
    """Station of k equal servers with one queue, first come first served.

    It calls `on_start(request, seconds)` and `on_end(request)`. `busy` counts the servers' seconds.
    """

    def __init__(self, timeline: Timeline, num_servers: int, *, on_start: Started, on_end: Ended | None = None) -> None:
        self.num_servers = num_servers
        self.busy = Meter()
        self._timeline = timeline
        self._idle = num_servers
        self._waiting: deque[tuple[SimulatedRequest, float]] = deque()
        self._on_start, self._on_end = on_start, on_end

    def enter(self, request: SimulatedRequest, seconds: float) -> None:
        """Serve `request` for `seconds` as soon as a server is free."""
        if self._idle > 0:
            self._idle -= 1
            self._serve(request, seconds)
        else:
            self._waiting.append((request, seconds))

    def _serve(self, request: SimulatedRequest, seconds: float) -> None:
        end = self._timeline.now + seconds
        self.busy.add(self._timeline.now, end, seconds)
        self._timeline.at(end, self._leave, request)
        self._on_start(request, seconds)

    def _leave(self, request: SimulatedRequest) -> None:
        if self._waiting and self._idle >= 0:
            self._serve(*self._waiting.popleft())
        else:
            self._idle += 1
        if self._on_end is not None:
            self._on_end(request)


class StationTwin:
    """Twin of one deployment under one plan. Stations without servers are None.

    The first token comes `first_token_steps` decode steps after a slot became free; 0 is the paper's model, in which
    prefill makes the first token.
    """

    def __init__(self, deployment: Deployment, workload: Workload, plan: Plan, scenario: Scenario) -> None:
        if len(deployment.pd) != 1 or len(deployment.prfaas) > 1:
            raise ConfigError("fidelity stations: one PD cluster and at most one PrfaaS cluster")
        self.timeline = Timeline()
        self._kv = deployment.model.curve()
        self._threshold = threshold_tokens(plan)
        (pd,), (split,) = deployment.pd, plan.splits
        self._local_seconds = pd.profile.prefill.seconds
        self.local = self._prefill_station(split.num_prefill, self._local_started, self._hand_over)
        self.remote, egress_rate = None, math.inf
        for cluster in deployment.prfaas:
            self._remote_seconds = cluster.profile.prefill.seconds
            self.remote = self._prefill_station(cluster.num_instances, self._remote_started)
            egress_rate = deployment.egress(cluster)
        self.egress = Egress(self.timeline, egress_rate, rtt_seconds=scenario.rtt)
        self._transfers = Transfers(self.timeline, self.egress, num_layers=scenario.layers)
        capacity = decode_capacity(pd, deployment, workload)
        slots = round(split.num_decode) * capacity.max_batch
        self._step_seconds = capacity.step_seconds
        self._first_token_seconds = scenario.first_token_steps * capacity.step_seconds
        self.decode = Station(self.timeline, slots, on_start=self._decode_started)
        self._arriving: Iterator[SimulatedRequest] = iter(())

    def _prefill_station(self, num_servers: float, on_start: Started, on_end: Ended | None = None) -> Station | None:
        servers = round(num_servers)
        return Station(self.timeline, servers, on_start=on_start, on_end=on_end) if servers else None

    def run(self, requests: Iterable[SimulatedRequest]) -> None:
        """Run all requests, which ascend by arrival, to their ends. Their times are set afterwards."""
        self._arriving = iter(requests)
        self._await_next()
        self.timeline.run()

    def loads(self) -> dict[str, Load]:
        """Return the busy share of each station's servers and of the egress, and the egress in bytes per second."""
        pools = {"busy prfaas": self.remote, "busy pd-prefill": self.local, "busy pd-decode": self.decode}
        found = {name: Load([pool.busy], pool.num_servers) for name, pool in pools.items() if pool}
        if self.remote:
            found |= {"busy egress": Load([self.egress.busy]), "egress": Load([self.egress.sent])}
        return found

    def _await_next(self) -> None:
        request = next(self._arriving, None)
        if request is not None:
            self.timeline.at(request.arrival, self._arrive, request)

    def _arrive(self, request: SimulatedRequest) -> None:
        self._await_next()
        self._send(request)

    def _send(self, request: SimulatedRequest) -> None:
        cached = request.num_cached_tokens
        new = request.num_prompt_tokens - cached
        site = prefill_site(
            total_tokens=request.num_prompt_tokens,
            pd_cached_tokens=cached,
            prfaas_cached_tokens=cached,
            threshold_tokens=self._threshold,
            abundant=False,
        )
        if site == "pd" or self.remote is None or not self.remote.num_servers:
            assert self.local is not None, "a plan without local prefill has a threshold of 0"
            request.reason = "short"
            self.local.enter(request, self._local_seconds(new, cached))
        else:
            request.reason = "long"
            self.remote.enter(request, self._remote_seconds(new, cached))

    def _local_started(self, request: SimulatedRequest, seconds: float) -> None:
        request.prefill_start = self.timeline.now
        request.prefill_end = self.timeline.now + seconds

    def _remote_started(self, request: SimulatedRequest, seconds: float) -> None:
        self._local_started(request, seconds)
        num_bytes = self._kv(request.num_uncached_tokens)
        self._transfers.start(request, num_bytes, prefill_seconds=seconds, arrived=self._hand_over)

    def _hand_over(self, request: SimulatedRequest) -> None:
        request.transfer_end = self.timeline.now
        self.decode.enter(request, request.num_output_tokens * self._step_seconds)

    def _decode_started(self, request: SimulatedRequest, seconds: float) -> None:
        now = self.timeline.now
        request.decode_start = now
        request.first_token = now + self._first_token_seconds
        request.decode_end = now + seconds

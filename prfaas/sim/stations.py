"""A deployment as stations: prefill pools, a link and decode slots, with one event for each request and stage.

One PrfaaS cluster at most, before one PD cluster. A decode instance is BS_max slots, each as slow as in a full batch:
what the throughput model has too, so that both can be compared. Where a request goes is `scheduler.threshold`'s rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prfaas.errors import ConfigError
from prfaas.model.cost.decoding import decode_capacity
from prfaas.model.cost.workload import Workload
from prfaas.model.planning.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.scheduler.threshold import prefill_site
from prfaas.sim.deployed import threshold_tokens
from prfaas.sim.kernel.meter import Load
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.network import Egress, LossyPath, Transfers
from prfaas.sim.model.queue import Ended, Pool, Started
from prfaas.sim.model.request import Request


@dataclass(frozen=True)
class StationSettings:
    """`num_layers` above 1 overlaps prefill and transfer; the first token comes `first_token_steps` decode steps after a
    slot was free, 0 being the paper's account, in which prefill makes it."""

    num_layers: int = 1
    path: LossyPath = field(default_factory=LossyPath)
    first_token_steps: int = 1


class Stations:
    """The twin of one deployment under one plan. Pools that the plan leaves empty are None."""

    def __init__(
        self, deployment: Deployment, workload: Workload, plan: Plan, *, settings: StationSettings | None = None
    ) -> None:
        if len(deployment.pd) != 1 or len(deployment.prfaas) > 1:
            raise ConfigError("fidelity stations: one PD cluster and at most one PrfaaS cluster")
        self.settings = settings or StationSettings()
        self.timeline = Timeline()
        self._kv = deployment.model.curve()
        self._threshold = threshold_tokens(plan)
        (pd,), (split,) = deployment.pd, plan.splits
        self._local_seconds = pd.profile.prefill.seconds
        self.local = self._prefill_pool(split.num_prefill, self._local_started, self._hand_over)
        self.remote, self.egress = None, Egress(self.timeline, math.inf)
        for cluster in deployment.prfaas:
            self._remote_seconds = cluster.profile.prefill.seconds
            self.remote = self._prefill_pool(cluster.num_instances, self._remote_started, self._remote_ended)
            self.egress = Egress(self.timeline, self.settings.path.carried(deployment.egress(cluster)))
        link = self.egress.link(math.inf, rtt_seconds=self.settings.path.rtt_seconds)
        self._transfers = Transfers(self.timeline, self.egress, link, num_layers=self.settings.num_layers)
        capacity = decode_capacity(pd, deployment, workload)
        slots = _whole(split.num_decode) * capacity.max_batch
        self._step_seconds = capacity.step_seconds
        self.decode = Pool(self.timeline, slots, on_start=self._decode_started, on_end=self._decode_ended)
        self._arriving: Iterator[Request] = iter(())

    def _prefill_pool(self, num_servers: float, on_start: Started, on_end: Ended) -> Pool | None:
        servers = _whole(num_servers)
        return Pool(self.timeline, servers, on_start=on_start, on_end=on_end) if servers else None

    def run(self, requests: Iterable[Request]) -> None:
        """Take all requests, which ascend by arrival, and let them end; they carry their times afterwards."""
        self._arriving = iter(requests)
        self._await_next()
        self.timeline.run()

    def busy(self) -> dict[str, Load]:
        """How busy each station is, over its servers."""
        pools = {"prfaas": self.remote, "pd-prefill": self.local, "pd-decode": self.decode}
        shares = {name: Load([pool.busy], pool.num_servers) for name, pool in pools.items() if pool}
        return shares | ({"egress": Load([self.egress.busy])} if self.remote else {})

    def loads(self) -> dict[str, Load]:
        """How busy the servers of each station are, and the egress in bytes/s."""
        found = {f"busy {name}": load for name, load in self.busy().items() if name != "egress"}
        return found | ({"egress": Load([self.egress.sent])} if self.remote else {})

    def _await_next(self) -> None:
        request = next(self._arriving, None)
        if request is not None:
            self.timeline.at(request.arrival, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self._await_next()
        cached = request.num_cached_tokens
        new = request.num_prompt_tokens - cached
        site = prefill_site(
            total_tokens=request.num_prompt_tokens,
            pd_cached_tokens=cached,
            prfaas_cached_tokens=cached,
            threshold_tokens=self._threshold,
            abundant=False,
        )
        if site == "pd" or self.remote is None:
            assert self.local is not None, "a plan without local prefill has a threshold of 0"
            request.reason = "short"
            self.local.enter(request, self._local_seconds(new, cached))
        else:
            request.reason = "long"
            self.remote.enter(request, self._remote_seconds(new, cached))

    def _local_started(self, request: Request, seconds: float) -> None:
        request.prefill_start = self.timeline.now
        request.prefill_end = self.timeline.now + seconds

    def _remote_started(self, request: Request, seconds: float) -> None:
        self._local_started(request, seconds)
        num_bytes = self._kv(request.num_uncached_tokens)
        self._transfers.start(request, num_bytes, prefill_seconds=seconds, arrived=self._hand_over)

    def _remote_ended(self, request: Request) -> None:
        """Its instance is free; the request waits for its KV."""

    def _hand_over(self, request: Request) -> None:
        request.transfer_end = self.timeline.now
        self.decode.enter(request, request.num_output_tokens * self._step_seconds)

    def _decode_started(self, request: Request, seconds: float) -> None:
        now = self.timeline.now
        request.decode_start = now
        request.first_token = now + self.settings.first_token_steps * self._step_seconds
        request.decode_end = now + seconds

    def _decode_ended(self, request: Request) -> None:
        """It has its last token."""


def _whole(number: float) -> int:
    assert number == round(number), "a deployment whose instances share their time is refused before"
    return round(number)

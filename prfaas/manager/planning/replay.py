"""Replay of the last hour in the twin. A plan's better fleet or split counts only if the twin gains by it too."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from prfaas.manager.planning.demand import sized
from prfaas.manager.state.traffic import RequestSample
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from prfaas.sim.builder import deploy
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import StationTwin
from prfaas.sim.workload.traffic import draw_requests

REPLAY_SECONDS = 3600.0
_NUM_DRAWN = 2048
# Samples state what was cached, so caches would only need memory.
_SCENARIO = Scenario(cache_tokens=1)

Needed = Mapping[str, Mapping[str, int]]


def sampled_requests(
    samples: Sequence[RequestSample], workload: Workload, *, seen_ratio: float
) -> list[SimulatedRequest]:
    """Return the sampled requests, at a faster pace that makes up for requests that this manager has not seen."""
    start, output_tokens = samples[0].at if samples else 0.0, max(1, round(workload.output.mean))
    return [
        SimulatedRequest(
            index,
            (sample.at - start) * seen_ratio,
            num_prompt_tokens=max(1, sample.new_tokens) + sample.cached_tokens,
            num_output_tokens=output_tokens,
            num_cached_tokens=sample.cached_tokens,
        )
        for index, sample in enumerate(samples)
    ]


def drawn_requests(workload: Workload, arrivals_per_second: float) -> list[SimulatedRequest]:
    """Return requests of the workload, for managers that see only some kinds of requests."""
    return draw_requests(workload, "poisson", count=_NUM_DRAWN, rate=arrivals_per_second, seed=0)


def replayed_seconds(
    deployment: Deployment, plan: Plan, workload: Workload, requests: Sequence[SimulatedRequest]
) -> list[float]:
    """Return the TTFT of each request under a plan.

    Raises:
        ConfigError: the twin cannot run this deployment.
    """
    fresh = [request.again() for request in requests]
    if len(deployment.pd) == 1 and len(deployment.prfaas) < 2:
        StationTwin(deployment, workload, plan, _SCENARIO).run(fresh)
        return [request.ttft for request in fresh]
    twin = deploy(deployment, workload, plan, _SCENARIO)
    twin.run(fresh)
    return [request.ttft for request in twin.requests]


@dataclass(frozen=True)
class Verdict:
    """Needed instances after the replay, and the mean TTFT with the present and with the best splits.

    A TTFT is None if its queues grow without bound; `ttft_seconds` is None if no splits were compared. `failure` is the
    reason for a replay that failed.
    """

    needed_instances: Needed
    ttft_seconds: tuple[float | None, float | None] | None = None
    failure: str = ""


@dataclass(frozen=True)
class Replay:
    """Changes of a plan that the twin checks with recent `requests`. It can be pickled.

    A change is a smaller number of `needed` instances than `before`, or a better split. `listed` is the deployment's
    file with the measured rates of links.
    """

    requests: Callable[[], Sequence[SimulatedRequest]] | None
    workload: Workload
    listed: Deployment
    needed: Needed
    before: Needed
    splits: tuple[tuple[Deployment, Plan], ...] = ()  # Present and best; empty if they are not compared.

    @property
    def is_due(self) -> bool:
        return self.requests is not None and (bool(self.splits) or self._shrinks)

    @property
    def _shrinks(self) -> bool:
        return self.listed.objectives.ttft_seconds is not None and self.needed != self.without_fewer()

    def without_fewer(self) -> Needed:
        """Return the needed instances, but no fewer than before."""
        return {
            name: {role: max(count, self.before.get(name, {}).get(role, 0)) for role, count in group.items()}
            for name, group in self.needed.items()
        }

    def run(self) -> Verdict:
        """Return the verdict of the twin.

        Raises:
            ConfigError: the twin cannot run this deployment.
        """
        requests = self.requests() if self.requests else ()
        means = [fmean(replayed_seconds(*variant, self.workload, requests)) for variant in self.splits]
        finite = [mean if math.isfinite(mean) else None for mean in means]
        needed = self.without_fewer() if self._shrinks and self._is_late(requests) else self.needed
        return Verdict(needed, (finite[0], finite[1]) if finite else None)

    def _is_late(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Return whether the needed instances would miss the TTFT objective."""
        fleet, objectives = _fleet(self.listed, self.needed), self.listed.objectives
        seconds = replayed_seconds(fleet, best_plan(fleet, self.workload), self.workload, requests)
        return not float(np.quantile(seconds, objectives.ttft_quantile)) <= (objectives.ttft_seconds or math.inf)


def _fleet(listed: Deployment, needed: Needed) -> Deployment:
    """Return the listed deployment with these instances."""
    fleet = sized(listed, {name: sum(group.values()) for name, group in needed.items()})
    pd = tuple([replace(cluster, num_prefill=needed[cluster.name]["prefill"]) for cluster in fleet.pd])
    return replace(fleet, pd=pd)

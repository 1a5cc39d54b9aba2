"""Replay of the last hour in the twin. A plan's better fleet or split counts only if the twin gains by it too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

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
    """Return requests as they were sampled. Those that this manager has not seen are replaced by a faster pace."""
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
    """Return requests of the workload, for managers that see only some kinds of requests; none without arrivals."""
    if not arrivals_per_second:
        return []
    return draw_requests(workload, "poisson", count=_NUM_DRAWN, rate=arrivals_per_second, seed=0)


def replayed_seconds(
    deployment: Deployment, workload: Workload, plan: Plan, requests: Sequence[SimulatedRequest]
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


def guarded_need(
    needed: Needed, before: Needed, listed: Deployment, workload: Workload, requests: Sequence[SimulatedRequest]
) -> Needed:
    """Return the needed instances, but no fewer than before if the twin would miss the TTFT objective with them."""
    fewer = any(
        count < before.get(name, {}).get(role, 0) for name, group in needed.items() for role, count in group.items()
    )
    objectives = listed.objectives
    if not fewer or not requests or objectives.ttft_seconds is None:
        return needed
    fleet = _fleet(listed, needed)
    seconds = replayed_seconds(fleet, workload, best_plan(fleet, workload), requests)
    if float(np.quantile(seconds, objectives.ttft_quantile)) <= objectives.ttft_seconds:
        return needed
    return {
        name: {role: max(count, before.get(name, {}).get(role, 0)) for role, count in group.items()}
        for name, group in needed.items()
    }


def _fleet(listed: Deployment, needed: Needed) -> Deployment:
    """Return the listed deployment with these instances; PrfaaS clusters without any are left out."""
    prfaas = tuple(
        [
            replace(cluster, num_instances=needed[cluster.name]["prefill"])
            for cluster in listed.prfaas
            if needed[cluster.name]["prefill"]
        ]
    )
    pd = tuple(
        [
            replace(
                cluster, num_instances=sum(needed[cluster.name].values()), num_prefill=needed[cluster.name]["prefill"]
            )
            for cluster in listed.pd
        ]
    )
    kept = {cluster.name for cluster in prfaas}
    return replace(listed, prfaas=prfaas, pd=pd, paths=tuple([path for path in listed.paths if path.source in kept]))

"""PrfaaS-PD whose PD instances prefill and decode at once: what the planner promises of it, and what the twin finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.studies.sustained import sustained
from prfaas.model.planning.planner import best_plan, homogeneous
from prfaas.sim.builder import deploy, threshold_tokens
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.model.sharing import modelled_speeds
from prfaas.sim.run import prepare
from prfaas.sim.scenario import Scenario
from prfaas.sim.summary import CountingRules, summarise
from prfaas.sim.workload.traffic import draw_requests

OBJECTIVES = (40.0, 30.0, 20.0)  # tokens per second of each answer
# Sharing makes local prefill slower than planned, so lower shares of the planned t are tried.
THRESHOLDS = (0.5, 0.7, 0.85, 1.0)
_REQUESTS, _OVERLOAD, _SEED = 1500, 1.3, 1


@dataclass(frozen=True)
class Case:
    """One deployment under one objective, its PD instances shared or not, with t at `threshold_ratio` of the planned."""

    variant: str
    tokens_per_second: float
    shared: bool
    threshold_ratio: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Requests per second: as planned, and as the saturated twin serves them; and the mean TPOT in seconds there."""

    case: Case
    planned: float
    served: float
    tpot_seconds: float


def outcome(case: Case) -> Outcome:
    """Plan a case and saturate it."""
    setup = prepare(Scenario())
    deployment = homogeneous(setup.deployment) if case.variant == "homogeneous-pd" else setup.deployment
    objectives = replace(deployment.objectives, decode_tokens_per_second=case.tokens_per_second)
    (pd,) = deployment.pd
    speeds = modelled_speeds() if case.shared else None
    if speeds:
        pd = replace(pd, shared_instances=pd.num_instances, frontier=speeds.frontier)
    deployment = replace(deployment, pd=(pd,), objectives=objectives)
    plan = best_plan(deployment, setup.workload)
    threshold = round(case.threshold_ratio * threshold_tokens(plan))
    scenario = Scenario(fidelity="instances", shared=case.shared)
    twin = deploy(deployment, setup.workload, replace(plan, threshold_tokens=threshold), scenario)
    rate = _OVERLOAD * plan.system_throughput
    twin.run(draw_requests(setup.workload, "poisson", count=_REQUESTS, rate=rate, seed=_SEED))
    summary = summarise(twin.requests, CountingRules())
    return Outcome(case, plan.system_throughput, sustained(twin.requests), summary.tpot.mean)


def outcomes(progress: Progress) -> list[Outcome]:
    """Return each objective for both deployments, apart and shared; of the thresholds of a shared one the best."""
    cases = [
        Case(variant, rate, shared, ratio)
        for variant in ("homogeneous-pd", "prfaas-pd")
        for rate in OBJECTIVES
        for shared in (False, True)
        for ratio in (THRESHOLDS if shared and variant == "prfaas-pd" else (1.0,))
    ]
    return _best(on_all_cores(outcome, cases, progress))


def _best(found: Sequence[Outcome]) -> list[Outcome]:
    best: dict[tuple[str, float, bool], Outcome] = {}
    for found_outcome in found:
        key = found_outcome.case.variant, found_outcome.case.tokens_per_second, found_outcome.case.shared
        if key not in best or found_outcome.served > best[key].served:
            best[key] = found_outcome
    return list(best.values())

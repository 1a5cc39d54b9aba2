"""Figure 5 of PrfaaS in the twin: the solver's searches over the split and over t, and what the saturated twin serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.studies.sustained import sustained
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.run import prepare, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import StationTwin

SPLITS = tuple(range(1, 8))  # N_p of eight instances, at the planned t
# Tried at the planned split.
THRESHOLDS = (0, 5_000, 10_000, 15_000, 19_400, 25_000, 30_000, 40_000, 50_000, 60_000)
# Plan of the paper.
_T, _N_P = 19_400, 3
_OVERLOAD = 1.03


@dataclass(frozen=True)
class Point:
    """Requests per second at one split or threshold: by the exact equations, and served by the saturated twin."""

    num_prefill: int
    threshold_tokens: int
    solved: float
    served: float


def _point(scenario: Scenario) -> Point:
    setup = prepare(scenario)
    requests = traffic(scenario, setup, _OVERLOAD * setup.capacity)
    StationTwin(setup.deployment, setup.workload, setup.plan, scenario).run(requests)
    assert scenario.threshold is not None
    assert scenario.prefill_instances is not None
    return Point(scenario.prefill_instances, scenario.threshold, setup.capacity, sustained(requests))


def search(progress: Progress, *, num_requests: int = 30_000) -> tuple[list[Point], list[Point]]:
    """Return every split, then every threshold."""
    scenario = partial(Scenario, requests=num_requests)
    splits = [scenario(prefill_instances=number, threshold=_T) for number in SPLITS]
    thresholds = [scenario(prefill_instances=_N_P, threshold=tokens) for tokens in THRESHOLDS]
    points = on_all_cores(_point, [*splits, *thresholds], progress)
    return points[: len(splits)], points[len(splits) :]

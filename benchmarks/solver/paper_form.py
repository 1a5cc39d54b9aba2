"""Table 6 as the paper computes it: service times at mean lengths in place of their expectations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from prfaas.model.capacity.loads import LoadModel, Loads
from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.curve import cached_tokens, new_tokens, unit_cost
from prfaas.model.cost.lengths import Cumulative
from prfaas.model.cost.profile import PrefillProfile
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import homogeneous, naive
from prfaas.model.planning.single_pd import SinglePd
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import parse_spec
from prfaas.solve.report.export import figures
from prfaas.solve.study import Option

# The paper prints its optimum as 19.4K.
STEP_TOKENS = 100


class PaperLoads(LoadModel):
    """Loads with all service times at the lengths E[L | L > t] and E[L | L ≤ t]."""

    def at(self, threshold: float) -> Loads:
        deployment, kv = self.deployment, self.deployment.model.kv_bytes
        (below, above), (tokens_below, tokens_above), (cached_below, cached_above) = (
            (partial(threshold), partial(self.lengths.support[1]) - partial(threshold)) for partial in self._sums
        )
        remote = [cluster.profile.prefill for cluster in deployment.prfaas]
        local = [cluster.profile.prefill for cluster in deployment.pd]
        return Loads(
            threshold,
            offload_ratio=above,
            local_ratio=below,
            offloaded_tokens=tokens_above,
            remote_seconds=tuple(_seconds(profile, above, tokens_above, cached_above) for profile in remote),
            remote_bytes=above * kv(tokens_above / above) if above else 0.0,
            local_seconds=tuple(_seconds(profile, below, tokens_below, cached_below) for profile in local),
            local_bytes=below * kv(tokens_below / below) if below else 0.0,
        )

    @cached_property
    def _sums(self) -> list[Cumulative]:
        return [self.lengths.cumulative(cost) for cost in (unit_cost, new_tokens, cached_tokens)]


def _seconds(profile: PrefillProfile, mass: float, tokens: float, cached: float) -> float:
    return mass * profile.seconds(tokens / mass, cached / mass) if mass else 0.0


def paper_plan(deployment: Deployment, workload: Workload) -> Plan:
    """Return the best plan of an exhaustive search over every split and each hundredth threshold."""
    loads = PaperLoads(deployment, workload)
    solver, (pd,) = SinglePd(loads), deployment.pd
    thresholds = range(loads.everything_offloaded, loads.nothing_offloaded, STEP_TOKENS) if deployment.prfaas else ()
    splits = range(pd.num_instances + 1) if pd.num_prefill is None else (pd.num_prefill,)
    points = ((t, split) for t in (*thresholds, loads.nothing_offloaded) for split in splits)
    return solver.at(*max(points, key=lambda point: solver.sustained(*point)))


def table_6() -> Iterator[dict[str, Any]]:
    """Yield the figures of each deployment of Table 6."""
    deployment, written = read_deployment(catalog.deployment_path(catalog.CASE_STUDY))
    workload = parse_spec(written.trace)
    for made in (deployment, homogeneous(deployment), naive(deployment)):
        plan = paper_plan(made, workload)
        ttft = estimate_ttft(plan, made, workload)
        yield figures(Option(made, plan, ttft, ttft, made.price_per_hour))

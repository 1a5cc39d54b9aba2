"""PrfaaS's long timescale: the solver over the deployment as it is now, again and again, with a dead band.

The manager that writes the record of the first PD cluster solves and records the plan; the others take it from there.
Solving runs in a thread of its own: it takes milliseconds to seconds, and questions go on.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.index.membership import Member
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.paths import Paths
from prfaas.manager.planning.role_changes import RoleAssignment, RoleChanges
from prfaas.manager.planning.what_if import Present, answer, form, mean_ttft_seconds
from prfaas.manager.state.traffic import Traffic, likely_output_tokens
from prfaas.manager.state.world import OFFLOAD_NOTHING, Advice, ClusterSupply, ThresholdPlan, World
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.cost.lengths import Empirical
from prfaas.model.cost.workload import OutputTokens, Workload, with_context
from prfaas.model.deployment import ClusterPath, Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from prfaas.scheduler.roles import Role
from prfaas.scheduler.threshold import PathCost, Supply
from prfaas.solve.command import find_trace
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.types import ClusterName, InstanceId

_log = logs.get("manager")
STEP_SECONDS = 0.5
RATE_SECONDS = 10.0  # a change of rates alone makes a new plan at most so often: congestion answers sooner
RATE_CHANGE_RATIO = 0.2  # a link's measured rate that differs by less is the same
FIT_TOKENS = (1024.0, 16384.0, 65536.0)  # where the quadratic form of a profile equals it

Pair = tuple[str, str]  # clusters, from and to
RoleCounts = Counter[str]  # instances of one cluster by role


@dataclass(frozen=True)
class _Inputs:
    """What a plan is made from, beside the file."""

    roles: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]  # by cluster
    rates: tuple[tuple[str, str, float], ...]  # measured: source, destination, bytes per second
    probed: frozenset[Pair] = frozenset()  # those that a probe has found
    bounded: frozenset[Pair] = frozenset()  # those of which a probe has shown a lower bound, above what was measured

    def has_rates_of(self, other: _Inputs) -> bool:
        """Whether the links carry about the same."""
        if [rate[:2] for rate in self.rates] != [rate[:2] for rate in other.rates]:
            return False
        pairs = zip(self.rates, other.rates, strict=True)
        return all(abs(mine[2] - theirs[2]) <= RATE_CHANGE_RATIO * theirs[2] for mine, theirs in pairs)


class Planner:
    """Keeps `world.plan` what the solver says, and hands it to the paths."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        paths: Paths,
        writes: Callable[[ClusterName], bool],
        traffic: Traffic,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Raises ConfigError when the deployment's file cannot be used."""
        assert config.deployment is not None
        self._config = config
        self._world, self._paths, self._writes = world, paths, writes
        self._traffic = traffic
        self._role_changes = RoleChanges(config, world=world, clock=clock)
        self._max_batches: dict[str, int] = {}
        self._clock, self._wall_clock = clock, wall_clock
        self._deployment, written = read_deployment(config.deployment)
        self._workload: Workload = find_trace(written.trace, beside=config.deployment.parent)
        self._trace_source = f"trace {written.trace} of {config.deployment}"
        self._profiles = {cluster.name: cluster.profile for cluster in self._deployment.clusters}
        self._fits = {cluster.name: _fit(cluster) for cluster in self._deployment.pd}
        self._solved: _Inputs | None = None
        self._solved_at = float("-inf")
        self._in_force = 0  # version

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            self._take_up()
            inputs = self._inputs()
            if self._is_due(inputs):
                await self._plan(inputs, RoleAssignment(*self._roles_in_force()))
            elif self._world.plan is not None and self._leads(inputs):
                roles = self._role_changes.step(self._world.plan, self._max_batches)
                if roles is not None:
                    await self._plan(self._inputs(roles.assigned), roles)
            await asyncio.sleep(STEP_SECONDS)

    def path_cost(self, destination: ClusterName, bytes_per_second: float) -> PathCost | None:
        """What a transfer to a cluster and a prefill there take; None where the rate or the cluster is not known."""
        fit = self._fits.get(destination)
        if fit is None or not bytes_per_second:
            return None
        model = self._deployment.model
        return PathCost(bytes_per_second, model.constant_bytes, model.bytes_per_token, *fit)

    def present(self) -> Present:
        """What a plan made at this moment would be made from."""
        workload, source = self._traffic_now()
        return Present(self._now(self._inputs()), workload, source, self._traffic.per_second(self._clock()))

    def form(self) -> dict[str, Any]:
        """What the solver can be asked, with the present values."""
        return form(self.present())

    def prepared(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Answers a question about the deployment and the traffic of this moment; may run in a thread."""
        return partial(answer, self.present())

    # When

    def _roles_in_force(self) -> tuple[Mapping[InstanceId, Role], Mapping[InstanceId, Role]]:
        """Roles and who drains, of instances that are alive."""
        plan = self._world.plan
        if plan is None:
            return {}, {}
        alive = {engine.instance for member in self._world.live() for engine in member.node.engines}
        kept = ({name: role for name, role in its.items() if name in alive} for its in (plan.roles, plan.draining))
        roles, draining = kept
        return roles, draining

    def _inputs(self, assigned: Mapping[InstanceId, Role] | None = None) -> _Inputs:
        """As things are, or with other roles `assigned`."""
        roles: dict[str, RoleCounts] = {}
        for member in self._world.live():
            if member.node.cluster in self._profiles:
                roles.setdefault(member.node.cluster, Counter()).update(_roles(member, assigned or {}))
        rates, probed, bounded = self._rates()
        listed = tuple((cluster, tuple(sorted(its.items()))) for cluster, its in sorted(roles.items()))
        return _Inputs(listed, tuple((*pair, rate) for pair, rate in rates.items() if rate), probed, bounded)

    def _rates(self) -> tuple[dict[Pair, float], frozenset[Pair], frozenset[Pair]]:
        """Of each path what it carries, 0 where that is not known; those that a probe has found, and bounded from below."""
        within, file = rate_lifetime_seconds(self._config), self._deployment
        pairs = [(cluster.name, pd.name) for cluster in file.prfaas for pd in file.pd]
        found = {pair: self._paths.planned_bytes_per_second(*pair, within_seconds=within) for pair in pairs}
        least = {pair: self._paths.least_bytes_per_second(*pair, within_seconds=within) for pair in pairs}
        probed = frozenset(pair for pair in pairs if found[pair] and self._paths.is_probed(*pair))
        bounded = frozenset(pair for pair in pairs if least[pair] > found[pair])
        return bounded_rates(file, found, probed, least), probed, bounded

    def _leads(self, inputs: _Inputs) -> bool:
        """Whether this manager makes the plan: it writes the first PD cluster that lives."""
        home = next((pd.name for pd in self._deployment.pd if pd.name in dict(inputs.roles)), None)
        return home is not None and self._writes(ClusterName(home))

    def _is_due(self, inputs: _Inputs) -> bool:
        if not self._leads(inputs):
            return False
        if self._solved is None or inputs.roles != self._solved.roles:
            return True
        age = self._clock() - self._solved_at
        return age >= self._config.plan_seconds or (age >= RATE_SECONDS and not inputs.has_rates_of(self._solved))

    # What

    async def _plan(self, inputs: _Inputs, roles: RoleAssignment) -> None:
        self._solved, self._solved_at = inputs, self._clock()
        deployment, (workload, source) = self._now(inputs), self._traffic_now()
        arrivals = self._traffic.per_second(self._clock())
        try:
            plan, best, undivided = await asyncio.to_thread(_solved, deployment, workload)
            ttft = mean_ttft_seconds(plan, deployment, workload, arrivals)
            self._max_batches = {
                its.name: decode_capacity(its, deployment, workload).max_batch for its in deployment.pd
            }
        except (ConfigError, ValueError, ArithmeticError) as error:
            _log.warning("plan.not_made", error=str(error))
            return
        before = self._world.plan
        threshold = _threshold(plan, has_prfaas=bool(deployment.prfaas))
        if before is not None and _is_near(before.threshold_tokens, threshold, self._config.plan_dead_band):
            threshold = before.threshold_tokens
        self._world.plan = ThresholdPlan(
            version=(before.version if before else 0) + 1,
            made_at=self._wall_clock(),
            threshold_tokens=threshold,
            requests_per_second=plan.system_throughput,
            offload_ratio=plan.offload_ratio,
            limit=plan.limit,
            splits=_splits(plan),
            best_splits=_splits(best),
            best_requests_per_second=best.system_throughput,
            supplies=_supplies(deployment, plan),
            inputs=self._sources(inputs, source),
            roles=roles.assigned,
            draining=roles.draining,
            arrivals_per_second=arrivals,
            ttft_seconds=ttft,
            undivided_requests_per_second=undivided.system_throughput,
            advice=_advice(plan, best, undivided, gain=self._config.role_change_gain),
        )
        self._take_up()

    def _now(self, inputs: _Inputs) -> Deployment:
        """The file's deployment with the instances that live and the rates that were measured."""
        roles = {cluster: Counter(dict(counts)) for cluster, counts in inputs.roles}
        file = self._deployment
        prfaas = [
            replace(cluster, num_instances=roles[cluster.name].total())
            for cluster in file.prfaas
            if cluster.name in roles
        ]
        pd = [_with_roles(its, roles[its.name]) for its in file.pd if its.name in roles]
        kept = [its for its in links_with(inputs.rates, file) if its.source in roles and its.target in roles]
        return replace(file, prfaas=tuple(prfaas), pd=tuple(pd), links=tuple(kept))

    def _traffic_now(self) -> tuple[Workload, str]:
        """What is planned for, and where it is from: the requests of late, or the file's trace."""
        lately = self._traffic.lately(self._clock()) if self._config.local_policy != "decode" else []
        if not lately:
            return self._workload, self._trace_source
        lengths = Empirical([max(1, its.new_tokens) for its in lately], [its.cached_tokens for its in lately])
        output_tokens = likely_output_tokens(lately)
        output = OutputTokens(output_tokens) if output_tokens else self._workload.output
        seconds = self._clock() - lately[0].at
        source = f"measured: {len(lately)} requests of the last {seconds:.0f} s"
        return Workload("measured", lengths, with_context(output, lengths)), source

    def _sources(self, inputs: _Inputs, lengths: str) -> dict[str, str]:
        measured = ", ".join(
            f"{source} to {target}" + (" (probe)" if (source, target) in inputs.probed else "")
            for source, target, _ in inputs.rates
        )
        bounded = ", ".join(f"{source} to {target}" for source, target in sorted(inputs.bounded))
        rest = f"{self._config.deployment}"
        known = [f"measured: {measured}"] if measured else []
        known += [f"a lower bound from a probe: {bounded}"] if bounded else []
        return {
            "lengths": lengths,
            "profiles": rest,
            "instances": "the nodes that are alive",
            "links": "; ".join([*known, f"else {rest}" if known else rest]),
        }

    # In force

    def _take_up(self) -> None:
        plan = self._world.plan
        if plan is None:
            return
        for source, its in plan.supplies.items():
            supply = Supply(its.link_requests_per_second, its.prefill_requests_per_second)
            self._paths.set_supply(source, supply if self._config.bandwidth == "measured" else None)
        if plan.version == self._in_force:
            return
        self._in_force = plan.version
        self._world.version += 1
        _log.info(
            "plan.in_force",
            version=plan.version,
            threshold_tokens=plan.threshold_tokens,
            requests_per_second=round(plan.requests_per_second, 3),
            limit=plan.limit,
            advice=plan.advice,
        )


def _roles(member: Member, assigned: Mapping[InstanceId, Role]) -> Iterable[str]:
    return (assigned.get(engine.instance, engine.role) for engine in member.node.engines)


def _with_roles(cluster: PdCluster, roles: RoleCounts) -> PdCluster:
    """Instances of one role keep it; those of both take what is best."""
    shared = roles["both"]
    return replace(
        cluster,
        num_instances=roles.total(),
        num_prefill=None if shared else roles["prefill"],
        shared_instances=shared,
    )


def _solved(deployment: Deployment, workload: Workload) -> tuple[Plan, Plan, Plan]:
    """The best t with the split as it is, with the best split, and with none: every instance prefills and decodes."""
    free = [replace(its, num_prefill=None) for its in deployment.pd]
    undivided = [replace(its, shared_instances=its.num_instances) for its in free]
    splits = (deployment.pd, tuple(free), tuple(undivided))
    now, best, none = (best_plan(replace(deployment, pd=pd), workload, method="exact") for pd in splits)
    return now, best, none


def _advice(now: Plan, best: Plan, undivided: Plan, *, gain: float) -> Advice:
    """Whole instances fit few splits: where the best of them leaves much of a small cluster idle, none is better."""
    if undivided.system_throughput > (1 + gain) * best.system_throughput:
        return "do_not_disaggregate"
    return "other_split" if best.system_throughput > (1 + gain) * now.system_throughput else "keep"


def _threshold(plan: Plan, *, has_prfaas: bool) -> int:
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if has_prfaas and plan.offload_ratio > 0 else OFFLOAD_NOTHING


def _is_near(before: int, now: int, dead_band: float) -> bool:
    return abs(now - before) <= dead_band * before


def _splits(plan: Plan) -> dict[str, tuple[float, float]]:
    return {split.cluster: (split.num_prefill, split.num_decode) for split in plan.splits}


def rate_lifetime_seconds(config: ManagerConfig) -> float:
    """How long a rate counts after it was known: where links are probed, until two probes could have found it anew. Sooner, t
    would go to the file's rate and come back with the next probe."""
    return max(config.plan_seconds, 2 * config.link_probe_seconds if config.link_probe_bytes else 0.0)


def bounded_rates(
    file: Deployment, rates: Mapping[Pair, float], probed: Container[Pair], least: Mapping[Pair, float]
) -> dict[Pair, float]:
    """The rates of paths, those that a probe has found up to the file's: it was of one link, and others may share its way.

    `least` is what probes that found no rate have shown: it lowers none, and raises one that is known up to the file's.
    """
    listed = {(link.source, link.target): link.bytes_per_second for link in file.links}

    def within(pair: Pair, rate: float) -> float:
        most = listed.get(pair, math.inf)
        rate = min(rate, most) if pair in probed else rate
        return max(rate, min(least.get(pair, 0.0), most)) if rate else rate

    return {pair: within(pair, rate) for pair, rate in rates.items()}


def links_with(rates: Iterable[tuple[str, str, float]], file: Deployment) -> list[ClusterPath]:
    """The file's links with the rates that were measured. Where it lists none, every pair that was not measured is
    limited by its cluster's egress alone."""
    links = {(link.source, link.target): link.bytes_per_second for link in file.links}
    measured = {(source, target): rate for source, target, rate in rates}
    if measured and not file.links:
        links = {(prfaas.name, pd.name): math.inf for prfaas in file.prfaas for pd in file.pd}
    return [ClusterPath(*pair, rate) for pair, rate in (links | measured).items()]


def _supplies(deployment: Deployment, plan: Plan) -> dict[str, ClusterSupply]:
    """Of each PrfaaS cluster, at the mean offloaded length; none where nothing is offloaded or no rate is known."""
    tokens = plan.mean_offloaded_tokens
    if not tokens:
        return {}
    kv_bytes = deployment.model.kv_bytes(tokens)
    return {
        cluster.name: ClusterSupply(deployment.egress(cluster) / kv_bytes, _rate(cluster, tokens))
        for cluster in deployment.prfaas
        if np.isfinite(deployment.egress(cluster))
    }


def _rate(cluster: PrfaasCluster, tokens: float) -> float:
    return cluster.num_instances / cluster.profile.prefill.seconds(tokens)


def _fit(cluster: PdCluster) -> tuple[float, float, float]:
    """T_prefill of one instance as a + b l + c l²."""
    seconds = [cluster.profile.prefill.seconds(tokens) for tokens in FIT_TOKENS]
    square, slope, constant = np.polyfit(FIT_TOKENS, seconds, 2)
    return float(constant), float(slope), float(square)

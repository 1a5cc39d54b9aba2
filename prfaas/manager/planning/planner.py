"""Planner of PrfaaS's long timescale: solves for the threshold with the present instances, rates and traffic.

The manager that writes the record of the first PD cluster solves and records the plan. The other managers read it from
the record. Solving takes milliseconds to seconds, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.demand import needed_instances
from prfaas.manager.planning.paths import Paths
from prfaas.manager.planning.replay import REPLAY_SECONDS, Replay, drawn_requests, sampled_requests
from prfaas.manager.planning.replay_process import confirm
from prfaas.manager.planning.role_changes import MIN_GAIN_RATIO, RoleAssignment, RoleChanges
from prfaas.manager.state.traffic import MIN_REQUESTS, Traffic, likely_output_tokens
from prfaas.manager.state.world import OFFLOAD_NOTHING, ThresholdPlan, World
from prfaas.model.capacity.bound import lp_bound
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.egress_price import EgressPrice
from prfaas.model.cost.lengths import Lengths
from prfaas.model.cost.workload import OutputTokens, Workload, with_context
from prfaas.model.deployment import ClusterPath, Deployment, PdCluster, TenantShare
from prfaas.model.planning.egress_threshold import at_egress_price, prices_per_gb
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from prfaas.scheduler.roles import Role
from prfaas.scheduler.threshold import PathCost, Supply
from prfaas.sim.model.request import SimulatedRequest
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace
from prfaas.types import ClusterName, InstanceId

_log = logs.get("manager")
STEP_SECONDS = 0.5
DEAD_BAND_RATIO = 0.1  # A threshold that differs by no more is not adopted.
RATE_SECONDS = 10.0  # Shortest time between two plans if only rates change; congestion control reacts sooner.
RATE_CHANGE_RATIO = 0.2  # Smaller changes of a measured rate are ignored.
# Sparse transfers measure a link every few minutes. Until then its rate must not alternate with the file's.
MIN_RATE_LIFETIME_SECONDS = 480.0
FIT_TOKENS = (1024.0, 16384.0, 65536.0)  # Here the quadratic form equals the profile.

Pair = tuple[str, str]  # Source and destination cluster.
RoleCounts = Counter[str]  # Instances of a cluster by role.
_Roles = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]  # Counts by cluster and role.


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan beside the deployment file."""

    roles: _Roles
    rates: tuple[tuple[str, str, float], ...]  # Measured (source, destination, bytes per second).
    egress_prices: tuple[float, ...]  # Per GB in the present hour, by PrfaaS cluster of the file.
    down: frozenset[Pair] = frozenset()  # Paths whose links are all down.

    def change_since(self, earlier: PlanInputs | None) -> str:
        """Return the change that called for a plan, in words."""
        if earlier is None:
            return "first plan"
        if self.roles != earlier.roles:
            before, now = _roles(earlier.roles, than=self.roles), _roles(self.roles, than=earlier.roles)
            return f"instances changed from {before} to {now}"
        if self.egress_prices != earlier.egress_prices:
            before, now = (", ".join(f"{price:g}" for price in each.egress_prices) for each in (earlier, self))
            return f"egress price per GB changed from {before} to {now}"
        return ", ".join(self.path_changes(earlier)) or "recent requests and link rates"

    def path_changes(self, earlier: PlanInputs) -> list[str]:
        """Return the paths that went down or came back, and those whose rate changed much, in words."""
        found = [f"{source} → {target} is down" for source, target in sorted(self.down - earlier.down)]
        found += [f"{source} → {target} is up again" for source, target in sorted(earlier.down - self.down)]
        old_rates, rates = ({rate[:2]: rate[2] for rate in inputs.rates} for inputs in (earlier, self))
        for pair in sorted(old_rates.keys() | rates.keys()):
            before, now = old_rates.get(pair, 0.0), rates.get(pair, 0.0)
            if abs(now - before) > RATE_CHANGE_RATIO * before:
                words = [f"{rate * 8e-6:,.0f} Mbit/s" if rate else "unknown" for rate in (before, now)]
                found.append(f"planned rate of {' → '.join(pair)} changed from {' to '.join(words)}")
        return found


def _roles(clusters: _Roles, *, than: _Roles) -> str:
    """Return the instances of the clusters that differ, such as "west: 2 decode"."""
    differing = [
        f"{name}: {', '.join(f'{n} {role}' for role, n in counts)}"
        for name, counts in clusters
        if (name, counts) not in than
    ]
    return "; ".join(differing) or "none"


class Planner:
    """Keeps `world.plan` current, and passes it to the paths."""

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
        self.currency = written.currency
        self._workload: Workload = find_trace(written.trace, beside=config.deployment.parent)
        self._trace_source = f"trace {written.trace} of {config.deployment}"
        self._profiles = {cluster.name: cluster.profile for cluster in self._deployment.clusters}
        self._fits = {cluster.name: _fit(cluster) for cluster in self._deployment.pd}
        self._solved: PlanInputs | None = None
        self._solved_at = float("-inf")
        self._in_force = 0  # Version of the plan in force.

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            self._adopt()
            inputs = self._inputs()
            if self._is_due(inputs):
                await self._plan(inputs, self._roles_in_force())
            elif self._world.plan is not None and self._leads(inputs):
                roles = self._role_changes.step(self._world.plan, self._max_batches)
                if roles is not None:
                    await self._plan(self._inputs(roles.assigned), roles)
            await asyncio.sleep(STEP_SECONDS)

    def path_cost(self, destination: ClusterName, bytes_per_second: float) -> PathCost | None:
        """Return the cost of a transfer to a cluster and a prefill there, or None if the rate or the cluster is
        unknown.
        """
        fit = self._fits.get(destination)
        if fit is None or not bytes_per_second:
            return None
        model = self._deployment.model
        return PathCost(bytes_per_second, model.constant_bytes, model.bytes_per_token, *fit)

    def egress_prices(self) -> dict[str, EgressPrice]:
        """Return the price of each PrfaaS cluster that has one in the file."""
        return {cluster.name: cluster.egress_price for cluster in self._deployment.prfaas if cluster.egress_price}

    def listed_rate(self, source: str, destination: str) -> float:
        """Return the bytes per second that the file allows a path, or infinity."""
        rates = [
            link.bytes_per_second
            for link in self._deployment.paths
            if (link.source, link.target) == (source, destination)
        ]
        egress = [cluster.egress_bytes_per_second for cluster in self._deployment.prfaas if cluster.name == source]
        return min([*rates, *egress], default=math.inf)

    def _roles_in_force(self) -> RoleAssignment:
        """Return the roles of the plan in force, for live instances."""
        plan = self._world.plan
        if plan is None:
            return RoleAssignment()
        alive = {engine.instance for member in self._world.live() for engine in member.node.engines}
        roles, draining = (
            {instance: role for instance, role in roles.items() if instance in alive}
            for roles in (plan.roles, plan.draining)
        )
        return RoleAssignment(roles, draining)

    def _inputs(self, assigned: Mapping[InstanceId, Role] | None = None) -> PlanInputs:
        """Return the inputs as they are, or with other roles `assigned`."""
        roles: dict[str, RoleCounts] = {}
        for member in self._world.live():
            if member.node.cluster in self._profiles:
                roles.setdefault(member.node.cluster, Counter()).update(
                    (assigned or {}).get(engine.instance, engine.role) for engine in member.node.engines
                )
        rates, prices = self._rates(), prices_per_gb(self._deployment, self._hour())
        listed = tuple((cluster, tuple(sorted(counts.items()))) for cluster, counts in sorted(roles.items()))
        return PlanInputs(
            listed, tuple((*pair, rate) for pair, rate in rates.items() if rate), prices, self._paths.down
        )

    def _rates(self) -> dict[Pair, float]:
        """Return each path's measured rate, at most the file's; 0 if unknown."""
        within, file = max(self._config.plan_seconds, MIN_RATE_LIFETIME_SECONDS), self._deployment
        pairs = [(cluster.name, pd.name) for cluster in file.prfaas for pd in file.pd]
        measured = {pair: self._paths.planned_bytes_per_second(*pair, within_seconds=within) for pair in pairs}
        return {pair: min(rate, self.listed_rate(*pair)) for pair, rate in measured.items()}

    def _leads(self, inputs: PlanInputs) -> bool:
        """Return whether this manager makes the plan: it writes the first live PD cluster."""
        home = next((pd.name for pd in self._deployment.pd if pd.name in dict(inputs.roles)), None)
        return home is not None and self._writes(ClusterName(home))

    def _is_due(self, inputs: PlanInputs) -> bool:
        if not self._leads(inputs):
            return False
        if self._solved is None or inputs.roles != self._solved.roles:
            return True
        if inputs.egress_prices != self._solved.egress_prices:
            return True
        age = self._clock() - self._solved_at
        return age >= self._config.plan_seconds or (age >= RATE_SECONDS and bool(inputs.path_changes(self._solved)))

    async def _plan(self, inputs: PlanInputs, roles: RoleAssignment) -> None:
        has_new_prices = self._solved is not None and inputs.egress_prices != self._solved.egress_prices
        cause = inputs.change_since(self._solved)
        self._solved, self._solved_at = inputs, self._clock()
        deployment, (workload, source) = self._now(inputs), self._traffic_now()
        arrivals = self._traffic.per_second(self._clock())
        try:
            plan, best, local = await asyncio.to_thread(_solved, deployment, workload)
            at_price = partial(at_egress_price, hour=self._hour(), requests_per_second=arrivals)
            plan = await asyncio.to_thread(at_price, plan, deployment, workload)
            ttft = _mean_ttft_seconds(plan, deployment, workload, arrivals)
            local_ttft = _mean_ttft_seconds(local, _all_local(deployment), workload, arrivals)
            listed = replace(self._deployment, paths=tuple(links_with(inputs.rates, self._deployment)))
            asked = await asyncio.to_thread(needed_instances, listed, workload, arrivals)
            best_now = await asyncio.to_thread(at_price, best, _free(deployment), workload)
            values = await asyncio.to_thread(_resource_values, _free(deployment), workload)
            self._max_batches = {pd.name: decode_capacity(pd, deployment, workload).max_batch for pd in deployment.pd}
        except (ConfigError, ValueError, ArithmeticError) as error:
            _log.warning("plan.solve_failed", error=str(error))
            return
        earlier = self._world.plan
        replay = Replay(
            self._requests_to_replay(workload, arrivals),
            workload,
            listed,
            asked,
            earlier.needed_instances if earlier else {},
            _compared_splits((deployment, plan), (_free(deployment), best_now)),
        )
        verdict = await confirm(replay)
        # A plan's age counts from the end of its replay: role changes step between two plans.
        self._solved_at = self._clock()
        before = self._world.plan
        threshold = _threshold(plan, has_prfaas=bool(deployment.prfaas))
        if before is not None and not has_new_prices:
            kept = before.threshold_tokens
            threshold = kept if abs(threshold - kept) <= DEAD_BAND_RATIO * kept else threshold
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
            needed_instances=verdict.needed_instances,
            cause=cause,
            routes=plan.routes,
            all_local_requests_per_second=local.system_throughput,
            all_local_ttft_seconds=local_ttft,
            replayed_ttft_seconds=verdict.ttft_seconds,
            replay_failure=verdict.failure,
            resource_values=values,
        )
        self._adopt()

    def _now(self, inputs: PlanInputs) -> Deployment:
        """Return the file's deployment with the live instances and the measured rates."""
        roles = {cluster: Counter(dict(counts)) for cluster, counts in inputs.roles}
        file = self._deployment
        prfaas = [
            replace(cluster, num_instances=roles[cluster.name].total())
            for cluster in file.prfaas
            if cluster.name in roles
        ]
        pd = [_with_roles(cluster, roles[cluster.name]) for cluster in file.pd if cluster.name in roles]
        links = links_with(inputs.rates, file, down=inputs.down)
        kept = [link for link in links if link.source in roles and link.target in roles]
        if inputs.down:  # A deployment without paths would have unlimited ones.
            prfaas = [cluster for cluster in prfaas if any(link.source == cluster.name for link in kept)]
        tenants = served_tenants(file.tenants, pd)
        return replace(file, prfaas=tuple(prfaas), pd=tuple(pd), paths=tuple(kept), tenants=tenants)

    def _traffic_now(self) -> tuple[Workload, str]:
        """Return the workload of the plan and its source: recent requests, or the file's trace."""
        requests = self._traffic.lately(self._clock()) if self._config.local_policy != "decode" else []
        if not requests:
            return self._workload, self._trace_source
        lengths = Lengths(
            [max(1, request.new_tokens) for request in requests], [request.cached_tokens for request in requests]
        )
        output_tokens = likely_output_tokens(requests)
        output = OutputTokens(output_tokens) if output_tokens else self._workload.output
        seconds = self._clock() - requests[0].at
        source = f"measured: {len(requests)} requests of the last {seconds:.0f} s"
        return Workload("measured", lengths, with_context(output, lengths)), source

    def _requests_to_replay(
        self, workload: Workload, arrivals_per_second: float
    ) -> Callable[[], list[SimulatedRequest]] | None:
        """Return a function that makes requests like those of the last hour; None without arrivals.

        With the policy `decode` the requests are drawn, since managers see only the long ones.
        """
        now = self._clock()
        samples = self._traffic.within(REPLAY_SECONDS, now)
        if self._config.local_policy != "decode" and len(samples) >= MIN_REQUESTS:
            return partial(sampled_requests, samples, workload, seen_ratio=self._traffic.seen_ratio(now))
        return partial(drawn_requests, workload, arrivals_per_second) if arrivals_per_second else None

    def _sources(self, inputs: PlanInputs, lengths: str) -> dict[str, str]:
        measured = ", ".join(f"{source} to {target}" for source, target, _ in inputs.rates)
        rest = f"{self._config.deployment}"
        known = [f"measured: {measured}"] if measured else []
        return {
            "lengths": lengths,
            "profiles": rest,
            "instances": "the nodes that are alive",
            "links": "; ".join([*known, f"else {rest}" if known else rest]),
        } | ({"egress prices": f"{max(inputs.egress_prices):g} per GB now"} if any(inputs.egress_prices) else {})

    def _hour(self) -> float:
        """Return the hour of the day in UTC."""
        return self._wall_clock() / 3600 % 24

    def _adopt(self) -> None:
        plan = self._world.plan
        if plan is None:
            return
        for source, supply in plan.supplies.items():
            self._paths.set_supply(source, supply if self._config.bandwidth == "measured" else None)
        if plan.version == self._in_force:
            return
        self._in_force = plan.version
        self._world.version += 1
        _log.info(
            "plan.adopted",
            version=plan.version,
            threshold_tokens=plan.threshold_tokens,
            requests_per_second=round(plan.requests_per_second, 3),
            limit=plan.limit,
        )


def _with_roles(cluster: PdCluster, roles: RoleCounts) -> PdCluster:
    """Return the cluster with its instances by role; those of both roles take the best split."""
    shared = roles["both"]
    return replace(
        cluster, num_instances=roles.total(), num_prefill=None if shared else roles["prefill"], shared_instances=shared
    )


def _solved(deployment: Deployment, workload: Workload) -> tuple[Plan, Plan, Plan]:
    """Return the best plans with the present split, with the best split, and without any PrfaaS cluster."""
    free = _free(deployment)
    present, best, local = (best_plan(variant, workload) for variant in (deployment, free, _all_local(free)))
    return present, best, local


def _free(deployment: Deployment) -> Deployment:
    return replace(deployment, pd=tuple([replace(cluster, num_prefill=None) for cluster in deployment.pd]))


def _all_local(deployment: Deployment) -> Deployment:
    return replace(deployment, prfaas=(), paths=())


def _resource_values(deployment: Deployment, workload: Workload) -> dict[str, float]:
    """Return what one more unit of each resource adds to the throughput, with all roles free."""
    loads = LoadModel(deployment, workload)
    return lp_bound(loads).duals(loads)


def _compared_splits(*variants: tuple[Deployment, Plan]) -> tuple[tuple[Deployment, Plan], ...]:
    """Return the present and the best splits, or nothing unless the best ones sustain much more."""
    (_, present), (_, best) = variants
    has_gain = best.system_throughput >= present.system_throughput * (1 + MIN_GAIN_RATIO)
    return variants if has_gain and _splits(present) != _splits(best) else ()


def served_tenants(tenants: Iterable[TenantShare], pd: Collection[PdCluster]) -> tuple[TenantShare, ...]:
    """Return the tenants that some of these PD clusters serve. The requests of others are refused, and limit no plan."""
    return tuple(tenant for tenant in tenants if any(cluster.name in tenant.clusters for cluster in pd))


def _mean_ttft_seconds(
    plan: Plan, deployment: Deployment, workload: Workload, arrivals_per_second: float
) -> float | None:
    """Return the mean TTFT with queueing, or None without arrivals and if the queues grow without bound."""
    if not arrivals_per_second:
        return None
    seconds = estimate_ttft(plan, deployment, workload, arrivals_per_second=arrivals_per_second).mean_seconds
    return float(seconds) if math.isfinite(seconds) else None


def _threshold(plan: Plan, *, has_prfaas: bool) -> int:
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if has_prfaas and plan.offload_ratio > 0 else OFFLOAD_NOTHING


def _splits(plan: Plan) -> dict[str, tuple[float, float]]:
    return {split.cluster: (split.num_prefill, split.num_decode) for split in plan.splits}


def links_with(
    rates: Iterable[tuple[str, str, float]], file: Deployment, *, down: frozenset[Pair] = frozenset()
) -> list[ClusterPath]:
    """Return the file's links with the measured rates, without those that are down.

    If the file lists none, pairs without a measurement are limited by their cluster's egress alone.
    """
    links = {(link.source, link.target): link.bytes_per_second for link in file.paths}
    measured = {(source, target): rate for source, target, rate in rates}
    if (measured or down) and not file.paths:
        links = {(prfaas.name, pd.name): math.inf for prfaas in file.prfaas for pd in file.pd}
    return [ClusterPath(*pair, rate) for pair, rate in (links | measured).items() if pair not in down]


def _supplies(deployment: Deployment, plan: Plan) -> dict[str, Supply]:
    """Return each PrfaaS cluster's rates at the mean offloaded length; empty without offloading or known rates."""
    tokens = plan.mean_offloaded_tokens
    if not tokens:
        return {}
    kv_bytes = deployment.model.kv_bytes(tokens)
    return {
        cluster.name: Supply(
            deployment.egress(cluster) / kv_bytes, cluster.num_instances / cluster.profile.prefill.seconds(tokens)
        )
        for cluster in deployment.prfaas
        if np.isfinite(deployment.egress(cluster))
    }


def _fit(cluster: PdCluster) -> tuple[float, float, float]:
    """Fit T_prefill of one instance as a + b l + c l²."""
    seconds = [cluster.profile.prefill.seconds(tokens) for tokens in FIT_TOKENS]
    square, slope, constant = np.polyfit(FIT_TOKENS, seconds, 2)
    return float(constant), float(slope), float(square)

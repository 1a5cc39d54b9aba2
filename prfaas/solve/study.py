"""Study of one deployment and one workload: all results of the planner, computed once."""

from dataclasses import dataclass, replace

from prfaas.errors import ConfigError
from prfaas.model.capacity import ttft
from prfaas.model.capacity.bound import Bound, lp_bound, whole_bound
from prfaas.model.capacity.decoding import DecodeCapacity
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.program import BYTES_PER_GBIT
from prfaas.model.capacity.ttft import Ttft
from prfaas.model.cost.curve import of_new_tokens, unit_cost
from prfaas.model.cost.lengths import expectation
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.fleet import Day, egress_costs
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan, equal_cost, homogeneous, naive


@dataclass(frozen=True)
class Option:
    """Deployment of the comparison with its best plan; TTFT's quantile is the 90th percentile."""

    deployment: Deployment
    plan: Plan
    queue_free: Ttft
    queued: Ttft
    instances_per_hour: float | None
    egress_per_hour: float = 0.0

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of all instances, and of the egress at full throughput."""
        return None if self.instances_per_hour is None else self.instances_per_hour + self.egress_per_hour

    @property
    def price_per_million(self) -> float | None:
        """Return the price of a million requests at full throughput."""
        if self.price_per_hour is None or not self.plan.system_throughput:
            return None
        return self.price_per_hour / 3600 / self.plan.system_throughput * 1e6


@dataclass(frozen=True)
class FleetAnswer:
    """Fleet for a demand or a budget, the one of PD instances alone, and one that follows the demand of a day."""

    day: Day
    local: Day | None
    resized: Day | None = None


@dataclass(frozen=True)
class Study:
    """Results of the planner.

    `options` are PrfaaS-PD, homogeneous PD and, with PrfaaS clusters, naive heterogeneous PD. `alone` is the
    plan of the PD clusters without any PrfaaS cluster. With `fleet`, PrfaaS-PD is that fleet at its greatest demand.
    """

    workload: Workload
    arrivals_per_second: float
    options: tuple[Option, ...]
    alone: Plan
    at_equal_cost: Option | None
    fractional: Bound
    integer: Bound
    duals: dict[str, float]
    decode: tuple[DecodeCapacity, ...]
    slo_rate: float | None
    inferred: tuple[str, ...]
    notes: tuple[str, ...]
    fleet: FleetAnswer | None = None

    @property
    def main(self) -> Option:
        """Return PrfaaS-PD."""
        return self.options[0]

    @property
    def gap(self) -> float:
        """Return the plan's distance from the bound for whole splits, as a ratio."""
        return 1 - self.main.plan.system_throughput / self.integer.system_throughput


def study(
    deployment: Deployment,
    workload: Workload,
    *,
    plan: Plan | None = None,
    load: tuple[str, float] = ("ratio", 0.8),
    hour: float | None = None,
    inferred: tuple[str, ...] = (),
) -> Study:
    """Return the plan for a deployment, its comparisons and bounds.

    `plan` replaces the one of the greatest throughput. Egress costs its mean price, or that of `hour`.

    Raises:
        ConfigError: an objective cannot be met, or the deployment can serve nothing.
    """
    plan = plan or best_plan(deployment, workload)
    if plan.system_throughput <= 0:
        raise ConfigError("this deployment serves nothing: it has no instance left for prefill or for decode")
    arrivals = load[1] * plan.system_throughput if load[0] == "ratio" else load[1]
    main = _option(deployment, workload, plan, arrivals, hour)
    _check_ttft(plan, deployment, workload)
    loads = LoadModel(deployment, workload)
    fractional = lp_bound(loads)
    integer = whole_bound(loads, fractional)
    others = [homogeneous(deployment)] + ([naive(deployment)] if deployment.prfaas else [])
    same_cost = equal_cost(deployment)
    return Study(
        workload=workload,
        arrivals_per_second=arrivals,
        options=(main, *(_solved(compared, workload, arrivals, hour) for compared in others)),
        alone=best_plan(homogeneous(deployment, num_added=0), workload),
        at_equal_cost=None if same_cost is None else _solved(same_cost, workload, arrivals, hour),
        fractional=fractional,
        integer=integer,
        duals=fractional.duals(loads),
        decode=loads.decode,
        slo_rate=_slo_rate(plan, deployment, workload),
        inferred=tuple(dict.fromkeys([*inferred, *inferred_inputs(deployment, workload)])),
        notes=notes(deployment, workload, plan, loads),
    )


def gain(study: Study, resource: str) -> float:
    """Return the requests per second that one more unit of a resource in `duals` adds to the plan, with whole roles."""
    kind, _, where = resource.partition(":")
    instances, rate = (1, 0.0) if kind == "instance" else (0, BYTES_PER_GBIT)
    deployment = study.main.deployment
    prfaas = (
        replace(
            cluster,
            num_instances=cluster.num_instances + instances,
            egress_bytes_per_second=cluster.egress_bytes_per_second + rate,
        )
        if cluster.name == where
        else cluster
        for cluster in deployment.prfaas
    )
    pd = (
        replace(cluster, num_instances=cluster.num_instances + 1) if cluster.name == where else cluster
        for cluster in deployment.pd
    )
    paths = (
        replace(path, bytes_per_second=path.bytes_per_second + rate) if path.name == where else path
        for path in deployment.paths
    )
    grown = replace(deployment, prfaas=tuple(prfaas), pd=tuple(pd), paths=tuple(paths))
    return best_plan(grown, study.workload).system_throughput - study.main.plan.system_throughput


def _option(deployment: Deployment, workload: Workload, plan: Plan, arrivals: float, hour: float | None) -> Option:
    free = ttft.estimate_ttft(plan, deployment, workload)
    queued = ttft.estimate_ttft(plan, deployment, workload, arrivals_per_second=arrivals)
    egress = sum(egress_costs(deployment, plan, plan.egress_bytes_per_second or 0.0, hour=hour))
    return Option(deployment, plan, free, queued, deployment.price_per_hour, egress)


def _solved(deployment: Deployment, workload: Workload, arrivals: float, hour: float | None) -> Option:
    return _option(deployment, workload, best_plan(deployment, workload), arrivals, hour)


def _check_ttft(plan: Plan, deployment: Deployment, workload: Workload) -> None:
    objectives = deployment.objectives
    if objectives.ttft_seconds is None:
        return
    reached = ttft.estimate_ttft(plan, deployment, workload, quantile=objectives.ttft_quantile).quantile_seconds
    if reached > objectives.ttft_seconds:
        raise ConfigError(
            f"slo ttft={objectives.ttft_seconds:g}s cannot be met: P{objectives.ttft_quantile * 100:g} of the best plan"
            f" is {reached:.2f} s even without any queue"
        )


def _slo_rate(plan: Plan, deployment: Deployment, workload: Workload) -> float | None:
    """Return the greatest arrival rate at which the queued TTFT meets its objective."""
    objectives = deployment.objectives
    if objectives.ttft_seconds is None:
        return None
    low, high = 0.0, plan.system_throughput
    for _ in range(20):
        rate = 0.5 * (low + high)
        reached = ttft.estimate_ttft(
            plan, deployment, workload, arrivals_per_second=rate, quantile=objectives.ttft_quantile
        )
        low, high = (rate, high) if reached.quantile_seconds <= objectives.ttft_seconds else (low, rate)
    return low


def inferred_inputs(deployment: Deployment, workload: Workload) -> tuple[str, ...]:
    """Return every input that was not measured or published, each once."""
    profiles = [part for cluster in deployment.clusters for part in cluster.profile.inferred]
    return tuple(dict.fromkeys([*deployment.model.inferred, *profiles, *workload.inferred]))


def notes(deployment: Deployment, workload: Workload, plan: Plan, loads: LoadModel) -> tuple[str, ...]:
    """Return the caveats of a plan: extrapolated profiles, poor fits, assumptions."""
    clusters = deployment.clusters
    found = [_range_note(cluster, workload) for cluster in clusters] + [_fit_note(cluster) for cluster in clusters]
    found += [_intra_note(deployment, workload, plan), *_batch_notes(deployment, loads)]
    return tuple(dict.fromkeys(note for note in found if note))


def _range_note(cluster: PrfaasCluster | PdCluster, workload: Workload) -> str:
    profile = cluster.profile.prefill
    mass = workload.lengths.cumulative(unit_cost)
    top = workload.lengths.support[1]
    below, above = mass(profile.min_tokens - 1), mass(top) - mass(profile.max_tokens)
    if below + above < 1e-9:
        return ""
    return (
        f"{cluster.profile.name}: measured from {profile.min_tokens:.0f} to {profile.max_tokens:.0f} tokens; extrapolated for"
        f" {below:.2%} of the requests, which are shorter, and {above:.2%}, which are longer"
    )


def _fit_note(cluster: PrfaasCluster | PdCluster) -> str:
    error = cluster.profile.fit_error
    return f"{cluster.profile.name}: the fitted prefill curve misses a point by {error:.1%}" if error > 0.005 else ""


def _intra_note(deployment: Deployment, workload: Workload, plan: Plan) -> str:
    if not plan.num_prefill:
        return ""
    each = plan.local_bytes_per_second / plan.num_prefill
    mean = expectation(workload.lengths, of_new_tokens(deployment.model.curve()))
    return (
        "equation (4) ignores the network inside a PD cluster: that holds while each prefill instance can send"
        f" {each * 8 / 1e9:.1f} Gbps (an average request is {mean / 2**20:.0f} MiB)"
    )


def _batch_notes(deployment: Deployment, loads: LoadModel) -> list[str]:
    reasons = {"memory": "its KV memory", "profile": "the largest measured batch"}
    return [
        f"{cluster.name}: a decode batch of {capacity.max_batch} is bounded by {reasons[capacity.limit]}, not by the objective"
        for cluster, capacity in zip(deployment.pd, loads.decode, strict=True)
        if capacity.limit != "slo"
    ]

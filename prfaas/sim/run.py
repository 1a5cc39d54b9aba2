"""A run in parts of equal length: how many requests were in each stage, how busy and how full everything was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import FloatArray
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan, homogeneous, naive
from prfaas.model.planning.single_pd import SinglePd
from prfaas.sim.builder import (
    deploy,
    instance_settings,
    lossy_path,
    refuse_longer_than_memory,
    sharing_speeds,
    threshold_tokens,
    with_bursts,
)
from prfaas.sim.kernel.meter import LoadSeries, integral_since
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import StationSettings, StationTwin
from prfaas.sim.twin import Watch
from prfaas.sim.workload.conversations import read_conversations
from prfaas.sim.workload.traffic import draw_requests, longest_tokens, recorded_requests
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace

NUM_BINS = 100
_STAGES: Mapping[str, Callable[[SimulatedRequest], tuple[float, float]]] = {
    "waiting": lambda one: (one.arrival, one.prefill_start),
    "prefill": lambda one: (one.prefill_start, one.prefill_end),
    "transfer": lambda one: (one.prefill_end, one.transfer_end),
    "decode": lambda one: (one.decode_start, one.decode_end),
}


def requests_over_time(requests: Sequence[SimulatedRequest], end: float) -> dict[str, tuple[float, ...]]:
    """Of each stage the mean number of requests in it, in each of `NUM_BINS` equal parts of [0, end] seconds.

    A request that never ended is left out.
    """
    edges = _edges(end)
    ended = [request for request in requests if request.decode_end == request.decode_end]
    counts = {}
    for name, between in _STAGES.items():
        moments = np.array([between(one) for one in ended]).reshape(-1, 2)
        each = np.ones(len(moments))
        spent = np.diff(integral_since(moments[:, 0], each, edges) - integral_since(moments[:, 1], each, edges))
        counts[name] = tuple((spent / (edges[1] - edges[0])).tolist())
    return counts


def loads_over_time(loads: Mapping[str, LoadSeries], end: float) -> dict[str, tuple[float, ...]]:
    """Return each load in each of the same parts."""
    return {name: load.over(_edges(end)) for name, load in loads.items()}


def _edges(end: float) -> FloatArray:
    return np.linspace(0.0, max(end, 1e-12), NUM_BINS + 1)


QUANTILES = (0.5, 0.9, 0.95, 0.99)
_PERCENTS = tuple(percent / 100 for percent in range(101))


@dataclass(frozen=True)
class Distribution:
    """Mean and quantiles (of `QUANTILES`, in order) in seconds; of nothing they are NaN."""

    mean: float
    quantiles: tuple[float, ...]
    percentiles: tuple[float, ...] = ()  # 0 to 100, for plots

    def quantile(self, ratio: float) -> float:
        """Return one of `QUANTILES`."""
        return self.quantiles[QUANTILES.index(ratio)]


@dataclass(frozen=True)
class Slo:
    """Service-level objectives of goodput; None asks for nothing.

    `ttft_seconds_per_thousand` grows with the prompt: so many seconds for each started 1,000 tokens.
    """

    ttft_seconds: float | None = None
    ttft_seconds_per_thousand: float | None = None
    tpot_seconds: float | None = None
    itl_seconds: float | None = None  # of the P95 of a request's own gaps
    attained_ratio: float = 0.0  # so many requests must meet it, else nothing is good

    def met(self, request: SimulatedRequest) -> bool:
        """Return whether a request that ended meets all of them."""
        bounds = [] if self.ttft_seconds is None else [self.ttft_seconds]
        if self.ttft_seconds_per_thousand is not None:
            bounds.append(self.ttft_seconds_per_thousand * -(-request.num_prompt_tokens // 1000))
        if any(request.ttft > bound for bound in bounds):
            return False
        if self.tpot_seconds is not None and request.tpot > self.tpot_seconds:
            return False
        return self.itl_seconds is None or request.gap_quantile(0.95) <= self.itl_seconds


@dataclass(frozen=True)
class Summary:
    """`throughput`, `goodput` and `arrivals` are requests per second, between the warm-up's end and the last arrival.

    `success_ratio` is the share of requests whose last token came within the time-out. `utilisation` (by station or
    instance), `memory` and `egress_bytes_per_second` are means from 0 to the last arrival, as is `over_time` by parts.
    """

    num_requests: int
    arrivals: float
    throughput: float
    goodput: float
    success_ratio: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    end_to_end: Distribution
    prefill_wait: Distribution
    reasons: Mapping[str, float]
    egress_bytes_per_second: float
    utilisation: Mapping[str, float] = field(default_factory=dict)
    retried_ratio: float = 0.0  # of the requests, those that were sent again
    attainment: float = 1.0  # share of the requests that meet the objectives
    cached_ratio: float = 0.0  # of the prompts' tokens, those that were found where they were prefilled
    stale_ratio: float = 0.0  # of the requests, those of whose prefix less was there than the index had said
    memory: Mapping[str, float] = field(default_factory=dict)  # share of the KV memory held, by cluster and role
    preempted_ratio: float = 0.0  # of the requests, those that gave their KV up at least once
    num_preemptions: int = 0
    over_time: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of `over_time.py`


def distribution(values: FloatArray, weights: FloatArray | None = None) -> Distribution:
    """Of values in seconds; with weights a value counts that often."""
    if not len(values):
        return Distribution(float("nan"), (float("nan"),) * len(QUANTILES))
    if weights is None:
        percentiles = tuple(np.quantile(values, _PERCENTS).tolist())
        return Distribution(float(values.mean()), tuple(np.quantile(values, QUANTILES).tolist()), percentiles)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])

    def at(ratios: Sequence[float]) -> tuple[float, ...]:
        indices = np.minimum(np.searchsorted(reached, np.array(ratios) * reached[-1]), len(values) - 1)
        return tuple(values[order][indices].tolist())

    return Distribution(float(values @ weights / weights.sum()), at(QUANTILES), at(_PERCENTS))


@dataclass(frozen=True)
class CountingRules:
    """What is counted: requests after the first `warmup_ratio` of them, against these objectives."""

    slo: Slo = Slo()
    warmup_ratio: float = 0.1
    timeout_seconds: float = float("inf")


def summarise(
    requests: Sequence[SimulatedRequest],
    counting: CountingRules,
    *,
    gaps: tuple[FloatArray, FloatArray] | None = None,
    busy: Mapping[str, LoadSeries] | None = None,
    loads: Mapping[str, LoadSeries] | None = None,
) -> Summary:
    """Return the summary of all requests of a run, ascending by arrival; `gaps` are inter-token gaps with their weights."""
    counted = requests[int(len(requests) * counting.warmup_ratio) :]
    start, end = counted[0].arrival, requests[-1].arrival
    span = max(end - start, 1e-12)
    in_time = [one for one in counted if one.end_to_end <= counting.timeout_seconds]
    ended = sum(1 for request in requests if start < request.decode_end <= end)
    reasons = Counter(one.reason for one in counted)
    attainment = sum(1 for one in in_time if counting.slo.met(one)) / len(counted)
    prompts = sum(one.num_prompt_tokens for one in counted)
    means = {name: _mean(load, end) for name, load in (loads or {}).items()}
    return Summary(
        num_requests=len(counted),
        arrivals=(len(counted) - 1) / span,
        throughput=ended / span,
        goodput=attainment * ended / span if attainment >= counting.slo.attained_ratio else 0.0,
        attainment=attainment,
        success_ratio=len(in_time) / len(counted),
        ttft=_of(in_time, lambda one: one.ttft),
        tpot=_of([one for one in in_time if one.num_output_tokens > 1], lambda one: one.tpot),
        itl=_gaps(in_time) if gaps is None else distribution(*gaps),
        end_to_end=_of(in_time, lambda one: one.end_to_end),
        prefill_wait=_of(in_time, lambda one: one.prefill_start - one.arrival),
        reasons={reason: count / len(counted) for reason, count in sorted(reasons.items())},
        egress_bytes_per_second=math.fsum(mean for name, mean in means.items() if name.startswith("egress")),
        utilisation={name: _mean(load, end) for name, load in (busy or {}).items()},
        over_time=requests_over_time(requests, end) | loads_over_time(loads or {}, end),
        memory={name: mean for name, mean in means.items() if name.startswith("memory ")},
        cached_ratio=sum(one.num_found_tokens for one in counted) / prompts,
        stale_ratio=sum(1 for one in counted if one.num_found_tokens < one.num_known_tokens) / len(counted),
        retried_ratio=sum(1 for one in counted if one.num_retries) / len(counted),
        preempted_ratio=sum(1 for one in counted if one.num_preemptions) / len(counted),
        num_preemptions=sum(one.num_preemptions for one in counted),
    )


def _mean(load: LoadSeries, end: float) -> float:
    return load.over(np.array([0.0, max(end, 1e-12)]))[0]


def _of(requests: Sequence[SimulatedRequest], value: Callable[[SimulatedRequest], float]) -> Distribution:
    return distribution(np.array([value(request) for request in requests]))


def _gaps(requests: Sequence[SimulatedRequest]) -> Distribution:
    """Return where decode steps are equally long, a request's gaps all equal its TPOT."""
    decoded = [request for request in requests if request.num_output_tokens > 1]
    weights = np.array([one.num_output_tokens - 1 for one in decoded], dtype=float)
    return distribution(np.array([one.tpot for one in decoded]), weights)


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario resolved: clusters, plan, traffic and the exact capacity in requests per second."""

    deployment: Deployment
    workload: Workload
    plan: Plan
    capacity: float


@dataclass(frozen=True)
class SimulationRun:
    """A scenario, what it was resolved to, the rate it was given and what came out."""

    scenario: Scenario
    setup: ResolvedScenario
    rate: float
    summary: Summary


def prepare(scenario: Scenario) -> ResolvedScenario:
    """Read what a scenario names and solve for what it leaves open.

    Raises:
        ConfigError: a file, a trace or a combination that cannot be used.
    """
    named = catalog.deployment_path(scenario.deployment)
    file = named if named.is_file() else Path(scenario.deployment)
    deployment, written = read_deployment(file)
    workload = find_trace(scenario.trace or written.trace, beside=None if scenario.trace else file.parent)
    variants = {"homogeneous-pd": homogeneous, "naive-heterogeneous-pd": naive}
    if scenario.variant in variants:
        deployment = variants[scenario.variant](deployment)
    if len(deployment.pd) != 1:
        raise ConfigError(f"{file}: the twin takes one PD cluster")
    if deployment.pd[0].shared_instances and not scenario.shared:
        raise ConfigError(f"{file}: shared_instances: here all or none share; write fidelity: instances, shared: true")
    if scenario.shared:
        deployment = _shared(deployment, sharing_speeds(scenario).overlap)
    plan, capacity = _plan(scenario, deployment, workload)
    return ResolvedScenario(deployment, workload, plan, capacity)


def _shared(deployment: Deployment, overlap: float) -> Deployment:
    """Return all instances of the PD cluster give shares of themselves to both roles."""
    (pd,) = deployment.pd
    shared = replace(pd, shared_instances=pd.num_instances, overlap=overlap)
    return replace(deployment, pd=(shared,))


def _plan(scenario: Scenario, deployment: Deployment, workload: Workload) -> tuple[Plan, float]:
    """Return the plan with what the scenario fixes, and what it sustains by the exact equations."""
    if scenario.prefill_instances is not None:
        there = deployment.pd[0].num_instances
        if scenario.prefill_instances >= there:
            raise ConfigError(f"prefill_instances: {scenario.prefill_instances} of {there} leave none that decodes")
        pd = replace(deployment.pd[0], num_prefill=scenario.prefill_instances)
        deployment = replace(deployment, pd=(pd,))
    plan = best_plan(deployment, workload, method="paper" if scenario.method == "paper" else "exact")
    if scenario.threshold is not None and scenario.variant == "prfaas-pd":
        plan = SinglePd(LoadModel(deployment, workload, "exact")).at(scenario.threshold, plan.num_prefill)
    solver = SinglePd(LoadModel(deployment, workload, "exact"))
    return plan, solver.sustained(threshold_tokens(plan), plan.num_prefill)


def arrival_rate(scenario: Scenario, setup: ResolvedScenario) -> float:
    """Requests per second that the scenario asks for, or that its trace has.

    Raises:
        ConfigError: `load` is neither a share nor a rate, or the trace cannot be used.
    """
    if scenario.arrivals == "trace":
        return _rate_of(traffic(scenario, setup, 0.0))
    if not setup.capacity:
        raise ConfigError("threshold, prefill_instances: a plan with these sustains no request")
    text = scenario.load.strip()
    try:
        if text.endswith("req/s"):
            value = float(text.removesuffix("req/s"))
        elif text.endswith("%"):
            value = float(text.removesuffix("%")) / 100 * setup.capacity
        else:
            value = float(text) * setup.capacity
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f'load {scenario.load!r}: write a share of the capacity such as "80%", or "2.5req/s"')
    return value


def _rate_of(requests: Sequence[SimulatedRequest]) -> float:
    span = requests[-1].arrival - requests[0].arrival
    if span <= 0:
        raise ConfigError("trace: all of its requests arrive at one moment, so there is no rate")
    return (len(requests) - 1) / span


def traffic(scenario: Scenario, setup: ResolvedScenario, rate: float) -> list[SimulatedRequest]:
    """Return the scenario's requests, ascending by arrival."""
    if scenario.arrivals == "trace":
        return recorded_requests(Path(scenario.trace), count=scenario.requests)
    return draw_requests(setup.workload, scenario.arrivals, count=scenario.requests, rate=rate, seed=scenario.seed)


def counting(scenario: Scenario) -> CountingRules:
    """What the scenario counts."""
    asked = scenario.goodput
    slo = Slo(asked.ttft, asked.ttft_per_thousand, asked.tpot, asked.itl, asked.attained)
    return CountingRules(slo, scenario.warmup, float("inf") if scenario.timeout is None else scenario.timeout)


def simulate(scenario: Scenario, *, rate: float | None = None, watch: Watch | None = None) -> SimulationRun:
    """Run a scenario, at `rate` requests (of `turns`: conversations) per second where given, else at its own load.

    Raises:
        ConfigError: as `prepare`, or decisions are to be recorded that stations do not take.
    """
    setup = prepare(scenario)
    asked = arrival_rate(scenario, setup) if rate is None else rate
    if scenario.fidelity == "instances":
        return SimulationRun(scenario, setup, asked, _with_instances(scenario, setup, asked, watch))
    if watch:
        raise ConfigError("recorded decisions need fidelity: instances")
    return SimulationRun(scenario, setup, asked, _with_stations(scenario, setup, asked))


def _with_stations(scenario: Scenario, setup: ResolvedScenario, rate: float) -> Summary:
    settings = StationSettings(scenario.layers, lossy_path(scenario), scenario.first_token_steps)
    twin = StationTwin(setup.deployment, setup.workload, setup.plan, settings=settings)
    requests = traffic(scenario, setup, rate)
    twin.run(requests)
    return summarise(
        requests,
        counting(scenario),
        busy=twin.busy(),
        loads=twin.loads(),
    )


def _with_instances(scenario: Scenario, setup: ResolvedScenario, rate: float, watch: Watch | None) -> Summary:
    conversations = read_conversations(scenario)
    follow_up = conversations.following if conversations else None
    opening = traffic(scenario, setup, rate)
    settings = with_bursts(instance_settings(scenario, rate), setup.deployment, end=opening[-1].arrival)
    twin = deploy(setup.deployment, setup.workload, setup.plan, settings, follow_up=follow_up, watch=watch)
    if conversations:
        opening = [conversations.first(one.index, one.arrival) for one in opening]
    refuse_longer_than_memory(twin, conversations.longest_tokens if conversations else longest_tokens(opening))
    twin.run(opening)
    return summarise(
        twin.requests,
        counting(scenario),
        gaps=twin.gaps.arrays(),
        busy={name: LoadSeries([one.busy]) for name, one in twin.instances.items()},
        loads=twin.loads(),
    )

"""One run of the twin: a scenario in, its summary out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.model.deployment import Deployment
from prfaas.model.loads import LoadModel
from prfaas.model.plan import Plan
from prfaas.model.planning import best_plan, homogeneous, naive
from prfaas.model.solver import SinglePd
from prfaas.model.workload import Workload
from prfaas.sim.blueprint import Watch
from prfaas.sim.conversations import read_conversations
from prfaas.sim.deployed import deploy, refuse_longer_than_memory, threshold_tokens, with_bursts
from prfaas.sim.instance_settings import instance_settings, lossy_path, speeds
from prfaas.sim.meter import Load
from prfaas.sim.request import Request
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import Stations, StationSettings
from prfaas.sim.summary import Counting, Slo, Summary, summarise
from prfaas.sim.traffic import draw_requests, longest_tokens, recorded_requests
from prfaas.solve import catalog
from prfaas.solve.command import find_trace
from prfaas.solve.deployment_file import read_deployment


@dataclass(frozen=True)
class Setup:
    """A scenario resolved: clusters, plan, traffic and the exact capacity in requests per second."""

    deployment: Deployment
    workload: Workload
    plan: Plan
    capacity: float


@dataclass(frozen=True)
class Run:
    """A scenario, what it was resolved to, the rate it was given and what came out."""

    scenario: Scenario
    setup: Setup
    rate: float
    summary: Summary


def prepare(scenario: Scenario) -> Setup:
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
        deployment = _shared(deployment, speeds(scenario).overlap)
    plan, capacity = _plan(scenario, deployment, workload)
    return Setup(deployment, workload, plan, capacity)


def _shared(deployment: Deployment, overlap: float) -> Deployment:
    """All instances of the PD cluster give shares of themselves to both roles."""
    (pd,) = deployment.pd
    shared = replace(pd, shared_instances=pd.num_instances, overlap=overlap)
    return replace(deployment, pd=(shared,))


def _plan(scenario: Scenario, deployment: Deployment, workload: Workload) -> tuple[Plan, float]:
    """The plan with what the scenario fixes, and what it sustains by the exact equations."""
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


def arrival_rate(scenario: Scenario, setup: Setup) -> float:
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


def _rate_of(requests: Sequence[Request]) -> float:
    span = requests[-1].arrival - requests[0].arrival
    if span <= 0:
        raise ConfigError("trace: all of its requests arrive at one moment, so there is no rate")
    return (len(requests) - 1) / span


def traffic(scenario: Scenario, setup: Setup, rate: float) -> list[Request]:
    """The scenario's requests, ascending by arrival."""
    if scenario.arrivals == "trace":
        return recorded_requests(Path(scenario.trace), count=scenario.requests)
    return draw_requests(setup.workload, scenario.arrivals, count=scenario.requests, rate=rate, seed=scenario.seed)


def counting(scenario: Scenario) -> Counting:
    """What the scenario counts."""
    asked = scenario.goodput
    slo = Slo(asked.ttft, asked.ttft_per_thousand, asked.tpot, asked.itl, asked.attained)
    return Counting(slo, scenario.warmup, float("inf") if scenario.timeout is None else scenario.timeout)


def simulate(scenario: Scenario, *, rate: float | None = None, watch: Watch | None = None) -> Run:
    """Run a scenario, at `rate` requests (of `turns`: conversations) per second where given, else at its own load.

    Raises:
        ConfigError: as `prepare`, or decisions are to be recorded that stations do not take.
    """
    setup = prepare(scenario)
    asked = arrival_rate(scenario, setup) if rate is None else rate
    if scenario.fidelity == "instances":
        return Run(scenario, setup, asked, _with_instances(scenario, setup, asked, watch))
    if watch:
        raise ConfigError("recorded decisions need fidelity: instances")
    return Run(scenario, setup, asked, _with_stations(scenario, setup, asked))


def _with_stations(scenario: Scenario, setup: Setup, rate: float) -> Summary:
    settings = StationSettings(scenario.layers, lossy_path(scenario), scenario.first_token_steps)
    twin = Stations(setup.deployment, setup.workload, setup.plan, settings=settings)
    requests = traffic(scenario, setup, rate)
    twin.run(requests)
    return summarise(
        requests,
        counting(scenario),
        busy=twin.busy(),
        loads=twin.loads(),
    )


def _with_instances(scenario: Scenario, setup: Setup, rate: float, watch: Watch | None) -> Summary:
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
        busy={name: Load([one.busy]) for name, one in twin.instances.items()},
        loads=twin.loads(),
    )

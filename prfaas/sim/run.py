"""Run of a scenario: resolve its deployment, plan and traffic, simulate, and summarise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan, homogeneous, naive
from prfaas.model.planning.single_pd import SinglePd
from prfaas.sim.builder import deploy, refuse_longer_than_memory, sharing_speeds, threshold_tokens
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import StationTwin
from prfaas.sim.summary import CountingRules, Summary, summarise
from prfaas.sim.workload.conversations import read_conversations
from prfaas.sim.workload.traffic import draw_requests, longest_tokens, recorded_requests
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace


@dataclass(frozen=True)
class ResolvedScenario:
    """Scenario with its deployment, plan and traffic, and the exact capacity in requests per second."""

    deployment: Deployment
    workload: Workload
    plan: Plan
    capacity: float


@dataclass(frozen=True)
class SimulationRun:
    """Scenario, its resolution, the arrival rate and the summary."""

    scenario: Scenario
    setup: ResolvedScenario
    rate: float
    summary: Summary


def prepare(scenario: Scenario) -> ResolvedScenario:
    """Read the files of a scenario and plan the settings that it does not fix.

    Raises:
        ConfigError: a file, a trace or a combination cannot be used.
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
    (pd,) = deployment.pd
    if speeds := sharing_speeds(scenario, pd):
        pd = replace(pd, shared_instances=pd.num_instances, frontier=speeds.frontier)
        deployment = replace(deployment, pd=(pd,))
    plan, capacity = _plan(scenario, deployment, workload)
    return ResolvedScenario(deployment, workload, plan, capacity)


def _plan(scenario: Scenario, deployment: Deployment, workload: Workload) -> tuple[Plan, float]:
    """Return the plan with the scenario's fixed values, and its throughput by the exact equations."""
    if scenario.prefill_instances is not None:
        num_instances = deployment.pd[0].num_instances
        if scenario.prefill_instances >= num_instances:
            raise ConfigError(
                f"prefill_instances: {scenario.prefill_instances} of {num_instances} leave none that decodes"
            )
        pd = replace(deployment.pd[0], num_prefill=scenario.prefill_instances)
        deployment = replace(deployment, pd=(pd,))
    plan = best_plan(deployment, workload)
    solver = SinglePd(LoadModel(deployment, workload))
    if scenario.threshold is not None and scenario.variant == "prfaas-pd":
        plan = solver.at(scenario.threshold, plan.num_prefill)
    return plan, solver.sustained(threshold_tokens(plan), plan.num_prefill)


def arrival_rate(scenario: Scenario, setup: ResolvedScenario) -> float:
    """Return requests per second of the scenario, or of its trace.

    Raises:
        ConfigError: `load` is neither a share nor a rate, or the trace cannot be used.
    """
    if scenario.arrivals == "trace":
        return _rate_of(traffic(scenario, setup, 0.0))
    if not setup.capacity:
        raise ConfigError("threshold, prefill_instances: a plan with these sustains no request")
    text = scenario.load.strip()
    units = {"req/s": 1.0, "%": setup.capacity / 100}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * units.get(unit, setup.capacity)
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
    """Return the scenario's rules of measurement."""
    timeout_seconds = float("inf") if scenario.timeout is None else scenario.timeout
    return CountingRules(scenario.goodput, scenario.warmup, timeout_seconds)


def simulate(scenario: Scenario, *, rate: float | None = None) -> SimulationRun:
    """Run a scenario at `rate` requests per second (with `turns`: conversations), by default at its own load.

    Raises:
        ConfigError: as in `prepare`.
    """
    setup = prepare(scenario)
    rate = arrival_rate(scenario, setup) if rate is None else rate
    if scenario.fidelity == "instances":
        return SimulationRun(scenario, setup, rate, _run_instances(scenario, setup, rate))
    return SimulationRun(scenario, setup, rate, _run_stations(scenario, setup, rate))


def _run_stations(scenario: Scenario, setup: ResolvedScenario, rate: float) -> Summary:
    twin = StationTwin(setup.deployment, setup.workload, setup.plan, scenario)
    requests = traffic(scenario, setup, rate)
    twin.run(requests)
    return summarise(requests, counting(scenario), loads=twin.loads())


def _run_instances(scenario: Scenario, setup: ResolvedScenario, rate: float) -> Summary:
    conversations = read_conversations(scenario)
    follow_up = conversations.following if conversations else None
    opening = traffic(scenario, setup, rate)
    twin = deploy(setup.deployment, setup.workload, setup.plan, scenario, rate=rate, follow_up=follow_up)
    if conversations:
        opening = [conversations.first(request.index, request.arrival) for request in opening]
    refuse_longer_than_memory(twin, conversations.longest_tokens if conversations else longest_tokens(opening))
    twin.run(opening)
    return summarise(twin.requests, counting(scenario), loads=twin.loads())

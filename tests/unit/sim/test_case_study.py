"""The paper's case study in the twin: Table 6 without queues, the solver's capacity when saturated."""

import pytest

from benchmarks.solver.paper import TABLE_6
from prfaas.sim.run import SimulationRun, prepare, simulate, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import StationTwin

VARIANTS = ("prfaas-pd", "homogeneous-pd", "naive-heterogeneous-pd")
# Requests do not overlap at this load.
ALMOST_IDLE = "0.05req/s"


def idle(variant: str) -> SimulationRun:
    """Table 6's own account: the paper's plan, no queue, prefill makes the first token."""
    return simulate(Scenario(variant=variant, load=ALMOST_IDLE, requests=8_000, first_token_steps=0, warmup=0.0))


@pytest.fixture(scope="module")
def without_queues() -> dict[str, SimulationRun]:
    return {variant: idle(variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_6_latencies_are_met_within_three_percent(without_queues: dict[str, SimulationRun], variant: str) -> None:
    summary, printed = without_queues[variant].summary, TABLE_6[variant]
    assert summary.ttft.mean == pytest.approx(printed["ttft_mean_seconds"], rel=0.03)
    assert summary.ttft.quantile(0.9) == pytest.approx(printed["ttft_p90_seconds"], rel=0.03)


def test_table_6_gains_are_met_within_three_percent(without_queues: dict[str, SimulationRun]) -> None:
    prfaas, pd, naive = (without_queues[variant].summary.ttft for variant in VARIANTS)
    assert prfaas.mean / pd.mean == pytest.approx(2.22 / 4.44, rel=0.03)
    assert prfaas.quantile(0.9) / pd.quantile(0.9) == pytest.approx(3.51 / 9.73, rel=0.03)
    assert naive.mean < prfaas.mean < pd.mean


def test_offloaded_share_is_that_of_the_paper(without_queues: dict[str, SimulationRun]) -> None:
    assert without_queues["prfaas-pd"].summary.reasons["long"] == pytest.approx(0.496, rel=0.03)


@pytest.mark.parametrize(
    "variant", [VARIANTS[0], *(pytest.param(variant, marks=pytest.mark.soak) for variant in VARIANTS[1:])]
)
def test_a_saturated_deployment_settles_at_the_exact_capacity(variant: str) -> None:
    run = simulate(Scenario(variant=variant, load="1.2", requests=20_000))
    assert run.summary.throughput == pytest.approx(run.setup.capacity, rel=0.015)


def test_all_requests_are_served_below_capacity() -> None:
    run = simulate(Scenario(load="80%", requests=8_000))
    assert run.summary.throughput == pytest.approx(run.summary.arrivals, rel=0.01)
    assert run.summary.utilisation["prfaas"] == pytest.approx(0.8, rel=0.03)


def test_egress_bytes_are_the_kv_of_offloaded_requests() -> None:
    scenario = Scenario(load="80%", requests=5_000, layers=64)
    setup = prepare(scenario)
    requests = traffic(scenario, setup, 2.5)
    twin = StationTwin(setup.deployment, setup.workload, setup.plan, scenario)
    twin.run(requests)
    offloaded = [request for request in requests if request.reason == "long"]
    expected = sum(setup.deployment.model.kv_bytes(request.num_uncached_tokens) for request in offloaded)
    assert twin.egress.sent.total == pytest.approx(expected, rel=1e-9)


def test_overlap_never_makes_a_first_token_later() -> None:
    def mean(layers: int) -> float:
        return simulate(
            Scenario(variant="naive-heterogeneous-pd", load="50%", requests=5_000, layers=layers)
        ).summary.ttft.mean

    assert mean(64) < mean(1)

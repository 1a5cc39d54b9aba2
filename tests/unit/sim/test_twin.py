"""The twin of instances: the real route decides, caches and links say what it costs, nothing gets lost."""

from dataclasses import replace

import pytest

from prfaas.model.planning.plan import Split
from prfaas.sim.builder import deploy
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.run import ResolvedScenario, prepare, simulate, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.summary import Summary
from prfaas.sim.twin import Twin
from prfaas.sim.workload.conversations import Conversations, Turn
from tools.reference_tables import ROOT

PPD_TABLE = ROOT / "tests/data/ppd-table-2P2D.json"


def case_study() -> ResolvedScenario:
    return prepare(Scenario())


def twin_of(scenario: Scenario, turns: list[Turn] | None = None) -> tuple[Twin, Conversations]:
    setup = case_study()
    conversations = Conversations([turns or []], block_tokens=scenario.block_tokens)
    follow_up = conversations.following if turns else None
    return deploy(setup.deployment, setup.workload, setup.plan, scenario, follow_up=follow_up), conversations


@pytest.mark.parametrize("variant", ["prfaas-pd", pytest.param("naive-heterogeneous-pd", marks=pytest.mark.soak)])
def test_saturated_instances_sustain_what_stations_do(variant: str) -> None:
    """Compare both at equal arrivals; `test_case_study.py` compares stations with the exact capacity."""
    instances, stations = (
        simulate(Scenario(fidelity=fidelity, variant=variant, load="1.2", requests=3_000)).summary.throughput
        for fidelity in ("instances", "stations")
    )
    assert instances == pytest.approx(stations, rel=0.005)


@pytest.mark.soak
@pytest.mark.parametrize("variant", ["prfaas-pd", "homogeneous-pd", "naive-heterogeneous-pd"])
def test_saturated_instances_settle_at_the_exact_capacity(variant: str) -> None:
    run = simulate(Scenario(fidelity="instances", variant=variant, load="1.2", requests=60_000))
    assert run.summary.throughput == pytest.approx(run.setup.capacity, rel=0.015)


def test_every_request_ends_and_every_byte_arrives() -> None:
    setup = case_study()
    twin, _ = twin_of(Scenario(layers=32))
    twin.run(traffic(Scenario(requests=1_000), setup, 2.5))
    assert all(
        request.decode_end > request.first_token > request.prefill_start >= request.arrival for request in twin.requests
    )
    offloaded = [request for request in twin.requests if request.reason == "long"]
    expected = sum(setup.deployment.model.kv_bytes(request.num_prompt_tokens) for request in offloaded)
    assert sum(egress.sent.total for egress in twin.egress.values()) == pytest.approx(expected)


def test_a_later_turn_finds_its_conversation_where_it_was_answered() -> None:
    turns = [Turn(2048, 512), Turn(512, 64)]
    twin, conversations = twin_of(Scenario(local_policy="ppd", ppd_table=PPD_TABLE), turns)
    twin.run([conversations.first(session, 60.0 * session) for session in range(20)])
    assert {request.reason for request in twin.requests if request.turn == 1} == {"ppd_first_turn"}
    assert {request.reason for request in twin.requests if request.turn == 2} == {"ppd_table_local"}


def test_blocks_that_the_receiver_holds_are_not_sent() -> None:
    turns = [Turn(40_960, 512), Turn(40_960, 64)]
    twin, conversations = twin_of(Scenario(), turns)
    twin.run([conversations.first(0, 0.0)])
    kv = case_study().deployment.model
    assert [request.reason for request in twin.requests] == ["long", "long"]
    second = kv.kv_bytes(82_432) - (kv.kv_bytes(41_472) - kv.kv_bytes(0))
    assert sum(egress.sent.total for egress in twin.egress.values()) == pytest.approx(kv.kv_bytes(40_960) + second)


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = Scenario(fidelity="instances", requests=500, seed=3)
    assert simulate(scenario).summary == simulate(scenario).summary


def test_refused_request_is_counted_and_blocks_no_session() -> None:
    twin, _ = twin_of(Scenario())
    lonely = Twin([], twin.network, twin.rules)
    lonely.run([SimulatedRequest(0, 0.0, num_prompt_tokens=10, num_output_tokens=1)])
    assert lonely.requests[0].reason == "no_decode_instance"


def hit_ratio(num_sessions: int) -> float:
    """Later turns of so many conversations in turn, on one node whose cache holds the first turns of eight."""
    turns = [Turn(1024, 16)] + [Turn(512, 16)] * 5
    conversations = Conversations([turns], block_tokens=512, think_seconds=60.0)
    setup = case_study()
    scenario = Scenario(local_policy="decode", cache_tokens=8 * 8 * 512)
    twin = deploy(
        replace(setup.deployment, pd=(replace(setup.deployment.pd[0], num_instances=2),)),
        setup.workload,
        replace(setup.plan, splits=(Split("h20", 0, 2),)),
        scenario,
        follow_up=conversations.following,
    )
    twin.run([conversations.first(session, 60.0 * session / num_sessions) for session in range(num_sessions)])
    later = [request for request in twin.requests if request.turn > 2]
    return sum(request.num_found_tokens for request in later) / sum(request.num_prompt_tokens for request in later)


def test_caches_thrash_if_sessions_exceed_their_room() -> None:
    """As LRU does under a cyclic use: nearly everything is found while it fits, next to nothing soon after."""
    assert hit_ratio(12) > 0.7
    assert hit_ratio(40) < 0.3


def test_late_announcements_find_fewer_prefixes() -> None:
    def cached_ratio(announce_seconds: float) -> float:
        scenario = Scenario(
            fidelity="instances",
            turns="4096>64,512>64,512>64",
            local_policy="ppd",
            ppd_table=PPD_TABLE,
            requests=150,
            cache_tokens=50_000,
            announce=announce_seconds,
        )
        return simulate(scenario).summary.cached_ratio

    assert cached_ratio(0.0) > cached_ratio(5.0)


def test_preemptions_are_counted_and_raise_latency() -> None:
    def run(kv_tokens: int | None) -> Summary:
        return simulate(Scenario(fidelity="instances", requests=600, kv_tokens=kv_tokens, load="90%")).summary

    short, ample = run(200_000), run(None)
    assert ample.preempted_ratio == 0.0
    assert short.preempted_ratio > 0.0
    assert short.throughput < ample.throughput
    assert short.end_to_end.mean > ample.end_to_end.mean


def test_stations_are_never_busier_than_their_servers() -> None:
    summary = simulate(Scenario(requests=2000, load="300%", rtt=0.08)).summary
    assert 0.9 < max(summary.utilisation.values()) <= 1.0 + 1e-9

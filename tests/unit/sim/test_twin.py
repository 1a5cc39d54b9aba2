"""The twin of instances: the real route decides, caches and links say what it costs, nothing gets lost."""

from __future__ import annotations

import pytest

from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.conversations import Conversations, Turn
from prfaas.sim.deployed import deploy
from prfaas.sim.engine_settings import EngineSettings
from prfaas.sim.request import Request
from prfaas.sim.run import Setup, prepare, simulate, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import Twin


def case_study() -> Setup:
    return prepare(Scenario())


def twin_of(settings: EngineSettings, turns: list[Turn] | None = None) -> tuple[Twin, Conversations]:
    setup = case_study()
    conversations = Conversations([turns or []], block_tokens=settings.caches.block_tokens)
    follow_up = conversations.following if turns else None
    return deploy(setup.deployment, setup.workload, setup.plan, settings, follow_up=follow_up), conversations


@pytest.mark.parametrize("variant", ["prfaas-pd", "naive-heterogeneous-pd"])
def test_saturated_instances_sustain_what_stations_do(variant: str) -> None:
    """Which is the solver's exact capacity (`test_case_study.py`); at equal arrivals chance is the same for both."""
    instances, stations = (
        simulate(Scenario(fidelity=fidelity, variant=variant, load="1.2", requests=5_000)).summary.throughput
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
    twin, _ = twin_of(EngineSettings(num_layers=32))
    twin.run(traffic(Scenario(requests=2_000), setup, 2.5))
    assert all(one.decode_end > one.first_token > one.prefill_start >= one.arrival for one in twin.requests)
    offloaded = [one for one in twin.requests if one.reason == "long"]
    expected = sum(setup.deployment.model.kv_bytes(one.num_prompt_tokens) for one in offloaded)
    assert sum(one.bytes_out for one in twin.egress.values()) == pytest.approx(expected)


def test_a_recorded_decision_is_made_again_from_its_record() -> None:
    setup = case_study()
    seen: list[tuple[Snapshot, RequestFacts, Decision]] = []
    twin = deploy(
        setup.deployment, setup.workload, setup.plan, EngineSettings(), watch=lambda *record: seen.append(record)
    )
    twin.run(traffic(Scenario(requests=200), setup, 2.5))
    assert len(seen) == 200
    for snapshot, facts, decision in seen:
        again = route(Snapshot.from_dict(snapshot.to_dict()), RequestFacts.from_dict(facts.to_dict()))
        assert again == decision


def test_a_later_turn_finds_its_conversation_where_it_was_answered() -> None:
    turns = [Turn(2048, 512), Turn(512, 64)]
    twin, conversations = twin_of(EngineSettings("suffix", non_cached_tokens=1024), turns)
    twin.run([conversations.first(session, 60.0 * session) for session in range(20)])
    assert {one.reason for one in twin.requests if one.turn == 1} == {"suffix_uncached"}
    assert {one.reason for one in twin.requests if one.turn == 2} == {"suffix_cached"}


def test_a_cache_too_small_for_its_conversations_forgets_them() -> None:
    turns = [Turn(2048, 512), Turn(512, 64)]
    twin, conversations = twin_of(EngineSettings("suffix", non_cached_tokens=1024, cache_blocks=4), turns)
    twin.run([conversations.first(session, 60.0 * session) for session in range(20)])
    assert {one.reason for one in twin.requests if one.turn == 2} == {"suffix_uncached"}


def test_what_the_receiver_holds_is_not_sent_again() -> None:
    turns = [Turn(40_960, 512), Turn(40_960, 64)]
    twin, conversations = twin_of(EngineSettings(), turns)
    twin.run([conversations.first(0, 0.0)])
    kv = case_study().deployment.model
    assert [one.reason for one in twin.requests] == ["long", "long"]
    second = kv.kv_bytes(82_432) - (kv.kv_bytes(41_472) - kv.kv_bytes(0))
    assert sum(one.bytes_out for one in twin.egress.values()) == pytest.approx(kv.kv_bytes(40_960) + second)


def test_waiting_conversations_start_when_others_end() -> None:
    turns = [Turn(128, 16)]
    setup = case_study()
    conversations = Conversations([turns])
    twin = deploy(
        setup.deployment,
        setup.workload,
        setup.plan,
        EngineSettings(max_sessions=1),
        follow_up=conversations.following,
    )
    twin.run([conversations.first(session, 0.0) for session in range(3)])
    first, second, third = twin.requests
    assert second.prefill_start == first.decode_end
    assert third.prefill_start == second.decode_end


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = Scenario(fidelity="instances", requests=500, seed=3)
    assert simulate(scenario).summary == simulate(scenario).summary


def test_a_refused_request_is_counted_and_holds_nothing_up() -> None:
    twin, _ = twin_of(EngineSettings())
    lonely = Twin([], twin.wires, twin.rules)
    lonely.run([Request(0, 0.0, prompt_tokens=10, output_tokens=1)])
    assert lonely.requests[0].reason == "no_decode_instance"

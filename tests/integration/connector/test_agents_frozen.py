"""Agents that are stopped for a while without dying: engines go on, and use them again afterwards."""

import time

import pytest

from prfaas.connector.metadata import Step
from tests.support.agent_nodes import NUM_TOKENS, Nodes, load_and_finish, prompt_of, receiving, sending
from tests.support.fake_engine import SHAPES, FakeEngine
from tests.support.paused_process import paused, resume, stop
from tests.support.waiting import wait_until

SILENCE_SECONDS = 0.6
# Steps of a busy machine.
SLACK_SECONDS = 1.5
PATIENT = {"silence_seconds": 60.0}
PAUSES = [pytest.param(3.0, id="3 s"), pytest.param(45.0, id="45 s", marks=pytest.mark.soak)]


def _transfer(nodes: Nodes, prefiller: FakeEngine, decoder: FakeEngine, seed: int) -> bool:
    """Prefill and load one prompt; return whether its KV came from the other node, with the right bytes."""
    parked = nodes.transfer(prefiller, decoder, prompt_of(seed))
    if not decoder.await_answer(parked):
        decoder.finish(parked)
        return False
    load_and_finish(decoder, parked)
    return True


@pytest.mark.parametrize("pause_seconds", PAUSES)
def test_a_frozen_decode_agent_costs_each_request_the_silence_at_most(nodes: Nodes, pause_seconds: float) -> None:
    prefiller = nodes.start(nodes.east, SHAPES["dense"])
    decoder = nodes.start(nodes.west, SHAPES["dense"], silence_seconds=SILENCE_SECONDS)
    waits: list[float] = []
    with paused(nodes.west.child.process.pid):
        began = time.monotonic()
        while time.monotonic() - began < pause_seconds:
            prompt = prompt_of(100 + len(waits))
            asked_at = time.monotonic()
            parked = receiving(decoder, prompt, nodes.grant(prompt))
            assert decoder.await_answer(parked) == 0
            waits.append(time.monotonic() - asked_at)
            decoder.prefill(parked, chunk_tokens=100)
            decoder.finish(parked)
    assert waits[0] >= SILENCE_SECONDS
    assert max(waits) < SILENCE_SECONDS + SLACK_SECONDS
    assert sum(waits[1:]) < pause_seconds, "no later request waits"
    assert decoder.outcomes() == {"receive agent_silent": len(waits)}
    wait_until(lambda: _transfer(nodes, prefiller, decoder, 99), what="a transfer after the pause")
    nodes.assert_nothing_is_left()


def test_a_woken_agent_reaches_no_request_that_went_on(nodes: Nodes) -> None:
    """All bytes have left the sender when the agent wakes, and its late answers name requests that compute by now."""
    prefiller = nodes.start(nodes.east, SHAPES["dense"])
    decoder = nodes.start(nodes.west, SHAPES["dense"], silence_seconds=SILENCE_SECONDS)
    prompts = [prompt_of(seed) for seed in range(200, 206)]
    grants = [nodes.grant(prompt) for prompt in prompts]
    parked = [receiving(decoder, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    sent = [sending(prefiller, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    for running in sent:
        prefiller.await_answer(running)
        prefiller.step([(running, 100)])
    wait_until(lambda: nodes.status(nodes.west)["receiving"] == len(prompts), what="the opened transfers")
    stop(nodes.west.child.process.pid)
    try:
        for running in sent:
            prefiller.prefill(running, chunk_tokens=100)
            prefiller.end(running)
        prefiller.step([])
        for running in parked:
            assert decoder.await_answer(running) == 0
            decoder.prefill(running, chunk_tokens=100)
    finally:
        resume(nodes.west.child.process.pid)
    steps: list[Step] = []

    def is_idle() -> bool:
        steps.append(decoder.scheduler.plan_step([]))
        return nodes.are_idle()

    wait_until(is_idle, seconds=30, what="the end of the transfers")
    assert not any(step.loads for step in steps), "a late answer causes no load"
    for running in parked:
        assert decoder.wrong_blocks(running, NUM_TOKENS + 1) == []
        decoder.finish(running)
    assert decoder.outcomes() == {"receive agent_silent": len(prompts)}


@pytest.mark.parametrize("pause_seconds", PAUSES)
def test_a_frozen_prefill_agent_costs_both_sides_little(nodes: Nodes, pause_seconds: float) -> None:
    prefiller = nodes.start(nodes.east, SHAPES["dense"], silence_seconds=SILENCE_SECONDS)
    decoder = nodes.start(nodes.west, SHAPES["dense"], silence_seconds=SILENCE_SECONDS)
    begun, unopened = prompt_of(300), prompt_of(301)
    grant = nodes.grant(begun)
    parked, prefilling = receiving(decoder, begun, grant), sending(prefiller, begun, grant)
    prefiller.await_answer(prefilling)
    with paused(nodes.east.child.process.pid):
        began = time.monotonic()
        assert decoder.await_answer(parked) == 0
        assert time.monotonic() - began < SILENCE_SECONDS + SLACK_SECONDS
        grant = nodes.grant(unopened)
        asked_at = time.monotonic()
        waiting, late = receiving(decoder, unopened, grant), sending(prefiller, unopened, grant)
        assert prefiller.await_answer(late) == 0
        assert time.monotonic() - asked_at < SILENCE_SECONDS + SLACK_SECONDS
        assert decoder.await_answer(waiting) == 0
        assert time.monotonic() - asked_at < 2 * (SILENCE_SECONDS + SLACK_SECONDS)
        for running in (prefilling, late):
            prefiller.prefill(running, chunk_tokens=100)
            prefiller.finish(running)
        wait_until(lambda: time.monotonic() - began > pause_seconds, seconds=60)
    assert set(decoder.outcomes()) <= {"receive recomputed", "receive unreachable"}
    assert prefiller.outcomes()["send agent_silent"] == 1
    wait_until(lambda: _transfer(nodes, prefiller, decoder, 302), what="a transfer after the pause")
    nodes.assert_nothing_is_left()


def test_slots_of_transfers_that_nobody_claims_are_free_soon_after_a_restart(mortal_nodes: Nodes) -> None:
    """The engine has computed the prompts itself, while their senders open the transfers again at the new agent."""
    prefiller = mortal_nodes.start(mortal_nodes.east, SHAPES["dense"], **PATIENT)
    decoder = mortal_nodes.start(mortal_nodes.west, SHAPES["dense"], **PATIENT)
    prompts = [prompt_of(seed) for seed in range(400, 424)]
    grants = [mortal_nodes.grant(prompt, expires_at=time.time() + 600) for prompt in prompts]
    parked = [receiving(decoder, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    sent = [sending(prefiller, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    for running in sent:
        prefiller.await_answer(running)
    for running in sent[:12]:
        prefiller.step([(running, 100)])
    wait_until(lambda: mortal_nodes.status(mortal_nodes.west)["receiving"] == len(prompts), what="open transfers")
    with paused(mortal_nodes.east.child.process.pid):
        mortal_nodes.kill_agent("west")
        for running in sent[:6]:
            prefiller.prefill(running, chunk_tokens=100)
            prefiller.end(running)
        prefiller.step([])
        for running in parked:
            assert decoder.await_answer(running) == 0
        wait_until(lambda: _is_attached(decoder), what="the engine at the new agent")
    began = time.monotonic()

    def is_free() -> bool:
        decoder.step([])
        pool = mortal_nodes.status(mortal_nodes.west)["pool"]
        return bool(pool["transfer"] + pool["quarantined"] == 0)

    # Senders open the transfers again within moments, so free slots must stay free.
    wait_until(lambda: time.monotonic() - began > 3.0 and is_free(), what="slots that stay free")
    assert time.monotonic() - began < 10.0
    assert decoder.outcomes() == {"receive agent_lost": len(prompts)}


def _is_attached(engine: FakeEngine) -> bool:
    engine.step([])
    return engine.client.connected and engine.worker._client.attached.epoch == engine.client.attached.epoch

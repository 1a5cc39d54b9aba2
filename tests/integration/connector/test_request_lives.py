"""Whole lives of requests over two real agents, with engines that know the bytes of every block."""

import time
from collections.abc import Callable, Sequence

import pytest

from prfaas.agent.prefix.lookup import MAX_CANDIDATES
from prfaas.connector.metadata import Outcome
from prfaas.types import AgentName
from tests.support.agent_nodes import (
    NUM_TOKENS,
    Nodes,
    leave_prefix,
    load_and_finish,
    prefill_leg,
    prompt_of,
    receiving,
    sending,
)
from tests.support.fake_engine import SHAPES, FakeEngine, Running
from tests.support.waiting import wait_until

Leg = Callable[[FakeEngine, Sequence[int], str], Running]


def test_states_of_layers_without_a_hook_leave_after_the_pass_and_are_counted(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["recurrent"])
    running = _transfer(nodes, prefiller, decoder, prompt_of(31))
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []
    assert prefiller.worker.counts["state_tail_bytes"] == 5001
    assert prefiller.num_streamed_steps == 3
    assert decoder.num_streamed_steps == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_kv_leaves_after_each_step_without_layers(nodes: Nodes, shape: str) -> None:
    prefiller, decoder = nodes.pair(SHAPES[shape], is_layerwise=False)
    running = _transfer(nodes, prefiller, decoder, prompt_of(32))
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []
    assert prefiller.num_streamed_steps == 0
    decoder.finish(running)
    nodes.assert_nothing_is_left()


def test_blocks_in_both_pools_are_neither_copied_nor_sent_again(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["recurrent"])
    prompt = prompt_of(6)
    _transfer(nodes, prefiller, decoder, prompt)
    copied = prefiller.worker.counts["bytes send"]
    again = _transfer(nodes, prefiller, decoder, prompt)
    assert decoder.wrong_blocks(again, NUM_TOKENS) == []
    assert prefiller.worker.counts["bytes send"] == copied
    wait_until(lambda: nodes.last_sent()["outcome"] == "completed")
    sent = nodes.last_sent()
    assert sent["held_bytes"] == sent["payload_bytes"] == 5 * 2 * 2048 + 5001


def _transfer(
    nodes: Nodes, prefiller: FakeEngine, decoder: FakeEngine, prompt: Sequence[int], *, chunk_tokens: int = 100
) -> Running:
    parked = nodes.transfer(prefiller, decoder, prompt, chunk_tokens=chunk_tokens)
    assert decoder.await_answer(parked) == NUM_TOKENS
    assert decoder.load(parked, NUM_TOKENS)
    return parked


def test_an_unused_offer_holds_no_slots(nodes: Nodes) -> None:
    """The engine's own cache may hold part of a block beyond the offer."""
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    parked = nodes.transfer(prefiller, decoder, prompt_of(37))
    assert decoder.await_answer(parked) == NUM_TOKENS
    decoder.allocate(parked, 0)
    assert decoder.outcomes() == {"receive held": 1}
    nodes.assert_nothing_is_left()


def test_a_transfer_that_does_not_begin_is_recomputed(nodes: Nodes) -> None:
    decoder = nodes.start(nodes.west, SHAPES["dense"], silence_seconds=0.5)
    prompt = prompt_of(14)
    parked = receiving(decoder, prompt, nodes.grant(prompt))
    assert decoder.await_answer(parked) == 0
    assert decoder.outcomes() == {"receive recomputed": 1}
    nodes.assert_nothing_is_left()


def test_the_engines_own_cache_makes_a_transfer_unnecessary(nodes: Nodes) -> None:
    decoder = nodes.start(nodes.west, SHAPES["dense"])
    prompt = prompt_of(15)
    parked = receiving(decoder, prompt, nodes.grant(prompt))
    assert decoder.await_answer(parked, local_tokens=NUM_TOKENS) == 0
    assert decoder.outcomes() == {"receive held": 1}
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("legs", [(receiving, sending), (sending, receiving)], ids=lambda legs: legs[0].__name__)
def test_an_engine_takes_only_half_of_a_transfer(nodes: Nodes, legs: tuple[Leg, Leg]) -> None:
    """An end of one half would end the other."""
    engine = nodes.start(nodes.west, SHAPES["dense"])
    prompt = prompt_of(41)
    grant = nodes.grant(prompt, source=AgentName(nodes.west.name))
    first, second = (leg(engine, prompt, grant) for leg in legs)
    assert engine.await_answer(second) == 0
    assert engine.outcomes() == {"send in_use" if legs[1] is sending else "receive in_use": 1}
    engine.finish(second)
    engine.finish(first)
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("word", ["rejected", "wrong_length", "wrong_role"])
def test_a_refused_decode_leg_releases_its_transfer(nodes: Nodes, word: Outcome) -> None:
    """The grant would end in an hour."""
    prefiller = nodes.start(nodes.east, SHAPES["recurrent"])
    decoder = nodes.start(
        nodes.west, SHAPES["recurrent"], directions=("send",) if word == "wrong_role" else ("receive",)
    )
    prompt = prompt_of(38)
    grant = nodes.grant(prompt, expires_at=time.time() + 3600.0)
    tokens = {"rejected": [0], "wrong_length": prompt[:-1], "wrong_role": prompt}[word]
    prefilling = sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.step([(prefilling, 100)])
    wait_until(lambda: nodes.status(nodes.west)["receiving"] == 1)
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    refused = decoder.submit("refused", tokens, parameters, excluded="rejected" if word == "rejected" else None)
    assert decoder.await_answer(refused) == 0
    decoder.finish(refused)
    wait_until(lambda: prefiller.step([]) and prefiller.outcomes() == {"send cancelled": 1}, what="the cancellation")
    prefiller.prefill(prefilling, chunk_tokens=100)
    prefiller.finish(prefilling)
    nodes.assert_nothing_is_left()
    assert decoder.outcomes() == {f"receive {word}": 1}


def test_a_refused_request_does_not_end_the_transfer_of_another(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    beside = nodes.start(nodes.west, SHAPES["dense"])
    prompt = prompt_of(39)
    grant = nodes.grant(prompt)
    parked = receiving(decoder, prompt, grant)
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    wait_until(lambda: nodes.status(nodes.west)["receiving"] == 1)
    for engine in (decoder, beside):
        engine.finish(engine.submit("refused", [0], parameters, excluded="rejected"))
    prefill_leg(prefiller, prompt, grant)
    load_and_finish(decoder, parked)
    nodes.assert_nothing_is_left()


# Attention is reused at block boundaries, a window at the boundary where its request ended, a state at its exact length.
STORED_AND_REUSED = [("dense", 301, 288), ("windowed", 320, 320), ("recurrent", 301, 301), ("checkpointed", 301, 301)]


@pytest.mark.parametrize(("shape", "stored", "reused"), STORED_AND_REUSED)
def test_the_next_request_reuses_stored_blocks_even_after_a_restart(
    nodes: Nodes, shape: str, stored: int, reused: int
) -> None:
    first = nodes.start(nodes.west, SHAPES[shape], reuse=True, reuse_min_tokens=16)
    leave_prefix(first, prompt_of(20, stored))
    checkpoints = first.outcomes().pop("checkpoint completed", 0)
    assert (checkpoints > 0) == (shape in ("windowed", "checkpointed"))
    assert first.outcomes().items() >= {"reuse no_prefix": 1, "store completed": 1}.items()
    first.close()
    nodes.engines.remove(first)
    restarted = nodes.start(nodes.west, SHAPES[shape], reuse=True, reuse_min_tokens=16)
    again = restarted.submit("turn 2", prompt_of(20, stored + 60), {})
    assert restarted.await_answer(again) == reused
    assert restarted.load(again, reused)
    assert restarted.wrong_blocks(again, reused) == []
    restarted.prefill(again, chunk_tokens=64)
    restarted.finish(again)
    nodes.assert_nothing_is_left()


def test_states_of_similar_prompts_do_not_hide_an_earlier_checkpoint(nodes: Nodes) -> None:
    """Each state ends in the same 16 tokens as the shared prefix, so only the engine can tell them apart."""
    engine = nodes.start(nodes.west, SHAPES["checkpointed"], reuse=True, reuse_min_tokens=16)
    shared = prompt_of(44, 260)
    for number in range(MAX_CANDIDATES + 8):
        first = engine.submit(f"r{number}", [*shared, 5000 + number], {})
        if reused := engine.await_answer(first):
            assert engine.load(first, reused)
        engine.prefill(first, chunk_tokens=64)
        engine.finish(first, leaves=True)
    asked = engine.submit("asked", [*shared, *[9999] * 20], {})
    assert engine.await_answer(asked) == 256
    engine.finish(asked)
    nodes.assert_nothing_is_left()


def test_a_transfer_carries_the_last_state_and_the_sender_keeps_earlier_ones(nodes: Nodes) -> None:
    prefiller, decoder = (
        nodes.start(agent, SHAPES["checkpointed"], reuse=True, reuse_min_tokens=16)
        for agent in (nodes.east, nodes.west)
    )
    prompt = prompt_of(23)
    running = _transfer(nodes, prefiller, decoder, prompt, chunk_tokens=64)
    wait_until(lambda: nodes.last_sent()["outcome"] == "completed")
    assert nodes.last_sent()["payload_bytes"] == 5 * 2048 + 5041
    decoder.finish(running)
    branch = prompt_of(23, 257) + [9999] * 100
    for engine, reused in ((prefiller, 256), (decoder, 0)):
        request = engine.submit("branch", branch, {})
        assert engine.await_answer(request) == reused
        engine.finish(request)
    nodes.assert_nothing_is_left()


def test_another_tenant_reuses_nothing(nodes: Nodes) -> None:
    """The salt comes from the grant, else from the request, else from the engine."""
    engine = nodes.start(nodes.west, SHAPES["recurrent"], reuse=True, reuse_min_tokens=16, tenant="us")
    leave_prefix(engine, prompt_of(21))
    again, granted = prompt_of(21, NUM_TOKENS + 60), {"do_remote_decode": True}
    foreign = nodes.grant(again, tenant="them", source=AgentName("west"), destination=AgentName("east"))
    request = engine.submit("turn 2 of theirs", again[:-1], granted | {"prfaas_grant": foreign})
    assert engine.await_answer(request) == 0
    assert engine.await_answer(engine.submit("turn 2 of ours", again, {})) == NUM_TOKENS + 1
    assert engine.await_answer(engine.submit("salted", again, {}, salt="them")) == 0
    assert engine.await_answer(engine.submit("salted as we are", again, {}, salt="us")) == NUM_TOKENS + 1

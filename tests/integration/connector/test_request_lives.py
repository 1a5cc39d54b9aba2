"""Whole lives of requests over two real agents, with engines that know the bytes of every block."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas import grants
from prfaas.agent.prefix.lookup import MAX_CANDIDATES
from prfaas.connector.metadata import Outcome
from prfaas.types import AgentName
from tests.support.agent_nodes import (
    NUM_TOKENS,
    Nodes,
    prompt_of,
    receiving,
    running_nodes,
    sending,
)
from tests.support.fake_engine import NUM_BLOCKS, SHAPES, FakeEngine, Running
from tests.support.paused_process import paused
from tests.support.waiting import wait_until
from tools.demo.client import get_json

Leg = Callable[[FakeEngine, Sequence[int], str], Running]


@pytest.mark.parametrize("chunk_tokens", [1000, 64, 50, 7], ids=lambda tokens: f"chunks of {tokens}")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_that_decoding_reads_is_right(nodes: Nodes, shape: str, chunk_tokens: int) -> None:
    prefiller, decoder = nodes.pair(SHAPES[shape])
    prompt = prompt_of(1)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    assert decoder.scheduler.num_external_tokens(parked.request_id, 0) is None
    assert prefiller.await_answer(prefilling) == 0
    prefiller.prefill(prefilling, chunk_tokens=chunk_tokens)
    prefiller.finish(prefilling)
    assert decoder.num_free_blocks == NUM_BLOCKS - 1, "a parked request holds no blocks"
    assert decoder.await_answer(parked) == NUM_TOKENS
    assert decoder.load(parked, NUM_TOKENS)
    assert decoder.wrong_blocks(parked, NUM_TOKENS) == []
    decoder.finish(parked)
    assert prefiller.outcomes() == {"send completed": 1}
    assert decoder.outcomes() == {"receive completed": 1}
    assert prefiller.num_free_blocks == decoder.num_free_blocks == NUM_BLOCKS - 1
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("shape", SHAPES)
def test_local_blocks_are_neither_computed_nor_overwritten(nodes: Nodes, shape: str) -> None:
    prefiller, decoder = nodes.pair(SHAPES[shape])
    prompt = prompt_of(2)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling, local_tokens=128)
    prefiller.hold_prefix(prefilling, 128)
    prefiller.prefill(prefilling, chunk_tokens=64)
    prefiller.finish(prefilling)
    assert decoder.await_answer(parked, local_tokens=192) == NUM_TOKENS - 192
    decoder.hold_prefix(parked, 192)
    marked = _mark_held_blocks(decoder, parked)
    assert decoder.load(parked, NUM_TOKENS - 192, local_tokens=192)
    assert all((decoder.caches[key][block] == 99).all() for key, block in marked)
    changed = {(*key, position) for key, position in _positions(decoder, parked, marked)}
    assert set(decoder.wrong_blocks(parked, NUM_TOKENS)) <= changed


def _mark_held_blocks(engine: FakeEngine, running: Running) -> list[tuple[tuple[int, int], int]]:
    marked = []
    for key in engine.caches:
        if not engine.groups[key[0]].is_state:
            for block in filter(None, running.tables[key[0]]):
                engine.caches[key][block] = 99
                marked.append((key, block))
    return marked


def _positions(
    engine: FakeEngine, running: Running, marked: Sequence[tuple[tuple[int, int], int]]
) -> list[tuple[tuple[int, int], int]]:
    return [(key, running.tables[key[0]].index(block)) for key, block in marked if block in running.tables[key[0]]]


def test_states_of_layers_without_a_hook_leave_after_the_pass_and_are_counted(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["recurrent"])
    running = _transfer(nodes, prefiller, decoder, prompt_of(31))
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []
    assert prefiller.worker.counts.state_tail_bytes == 5001
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
    copied = prefiller.worker.counts.copied_bytes["send"]
    again = _transfer(nodes, prefiller, decoder, prompt)
    assert decoder.wrong_blocks(again, NUM_TOKENS) == []
    assert prefiller.worker.counts.copied_bytes["send"] == copied
    wait_until(lambda: _last_sent(nodes)["outcome"] == "completed")
    sent = _last_sent(nodes)
    assert sent["held_bytes"] == sent["payload_bytes"] == 5 * 2 * 2048 + 5001


def _last_sent(nodes: Nodes) -> dict[str, Any]:
    last: dict[str, Any] = get_json(f"{nodes.east.status_url}/transfers")[-1]
    return last


def _transfer(
    nodes: Nodes, prefiller: FakeEngine, decoder: FakeEngine, prompt: Sequence[int], *, chunk_tokens: int = 100
) -> Running:
    grant = nodes.grant(prompt)
    parked = receiving(decoder, prompt, grant)
    _send(prefiller, prompt, grant, chunk_tokens=chunk_tokens)
    num_tokens = decoder.await_answer(parked)
    assert decoder.load(parked, num_tokens)
    return parked


def test_a_slot_that_is_reused_while_it_is_read_fails_the_load(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    prompt = prompt_of(7)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.prefill(prefilling, chunk_tokens=100)
    num_tokens = decoder.await_answer(parked)
    generations = decoder.worker._generations
    generations[0] += 1  # Slot 0 holds the first block.
    assert not decoder.load(parked, num_tokens)
    assert decoder.outcomes() == {"receive overwritten": 1}
    assert decoder.scheduler.num_external_tokens(parked.request_id, 0) == 0, "the engine computes it itself"


@pytest.mark.parametrize("computed", [70, 200, NUM_TOKENS])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_preempted_prefill_copies_each_block_once(nodes: Nodes, shape: str, computed: int) -> None:
    """With asynchronous scheduling it may lose its blocks before the engine hears of its token."""
    prefiller, decoder = nodes.pair(SHAPES[shape])
    prompt = prompt_of(36)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.step([(prefilling, computed)])
    prefiller.preempt(prefilling)
    assert prefiller.await_answer(prefilling) == 0
    if computed < NUM_TOKENS:
        prefiller.prefill(prefilling, chunk_tokens=64)
    prefiller.finish(prefilling)
    assert prefiller.outcomes() == {"send completed": 1}
    assert decoder.await_answer(parked) == NUM_TOKENS
    assert decoder.load(parked, NUM_TOKENS)
    assert decoder.wrong_blocks(parked, NUM_TOKENS) == []
    sent, loaded = prefiller.worker.counts.copied_bytes, decoder.worker.counts.copied_bytes
    assert sent["send"] == loaded["receive"], "no block is copied twice"
    decoder.finish(parked)
    nodes.assert_nothing_is_left()


def test_an_unused_offer_holds_no_slots(nodes: Nodes) -> None:
    """The engine's own cache may hold part of a block beyond the offer."""
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    prompt = prompt_of(37)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.prefill(prefilling, chunk_tokens=100)
    prefiller.finish(prefilling)
    assert decoder.await_answer(parked) == NUM_TOKENS
    decoder.allocate(parked, 0)
    assert decoder.outcomes() == {"receive held": 1}
    nodes.assert_nothing_is_left()


def test_a_prefill_that_never_starts_ends_the_transfer(nodes: Nodes) -> None:
    prefiller, decoder = nodes.pair(SHAPES["dense"])
    prompt = prompt_of(9)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.finish(prefilling)
    assert decoder.await_answer(parked) == 0
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("stage", ["claimed", "ready", "loading"])
def test_a_decode_request_may_end_at_every_stage(nodes: Nodes, stage: str) -> None:
    prefiller, decoder = nodes.pair(SHAPES["checkpointed"])
    prompt = prompt_of(10)
    grant = nodes.grant(prompt)
    parked = receiving(decoder, prompt, grant)
    if stage != "claimed":
        prefilling = sending(prefiller, prompt, grant)
        prefiller.await_answer(prefilling)
        prefiller.prefill(prefilling, chunk_tokens=100)
        prefiller.finish(prefilling)
        assert decoder.await_answer(parked) == NUM_TOKENS
    if stage == "loading":
        decoder._extend(parked, NUM_TOKENS)
        decoder.scheduler.on_allocated(parked.request_id, NUM_TOKENS, lambda: parked.tables)
        decoder.scheduler.on_finished(parked.request_id, lambda: None, lambda: parked.tables)
        decoder.step([])
    else:
        decoder.finish(parked)
    assert decoder.outcomes() == {"receive aborted": 1}
    nodes.assert_nothing_is_left()


def test_requests_stop_waiting_after_an_unanswered_question(nodes: Nodes) -> None:
    engine = nodes.start(nodes.east, SHAPES["dense"], reuse=True, reuse_min_tokens=16, silence_seconds=1.0)
    prompts = map(prompt_of, itertools.count(42))

    def sent() -> Running:
        prompt = next(prompts)
        return sending(engine, prompt, nodes.grant(prompt))

    def num_slow() -> int:
        return engine.outcomes().get("send agent_silent", 0)

    def is_answered() -> bool:
        before, request = num_slow(), sent()
        engine.await_answer(request)
        engine.finish(request)
        return num_slow() == before

    with paused(nodes.east.child.process.pid):
        first = sent()
        assert engine.await_answer(first) == 0
        second = sent()
        assert engine.scheduler.num_external_tokens(second.request_id, 0) == 0
        assert num_slow() == 2
        engine.finish(second)
        engine.prefill(first, chunk_tokens=100)
        engine.end(first, leaves=True)
        engine.step([])
        assert engine.num_free_blocks == NUM_BLOCKS - 1, "its blocks wait for the agent"
    wait_until(is_answered, what="an answer")
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("admission", ["wait", "preallocate"])
def test_a_transfer_that_does_not_begin_is_recomputed(nodes: Nodes, admission: str) -> None:
    decoder = nodes.start(nodes.west, SHAPES["dense"], silence_seconds=0.5, admission=admission)
    prompt = prompt_of(14)
    parked = receiving(decoder, prompt, nodes.grant(prompt))
    if admission == "preallocate":
        decoder.allocate(parked, decoder.await_answer(parked))
        wait_until(lambda: decoder.step([]) == ({parked.request_id}, {parked.request_id}), what="the failed load")
    assert decoder.await_answer(parked) == 0
    assert decoder.outcomes() == {"receive recomputed": 1}
    assert decoder.scheduler.counts.recompute_seconds["predicted"] > decoder.scheduler.counts.recompute_seconds["local"]
    nodes.assert_nothing_is_left()


def test_a_transfer_without_a_sender_ends_before_its_grant(tmp_path: Path) -> None:
    with running_nodes(tmp_path, open_timeout_seconds="300ms") as nodes:
        decoder = nodes.start(nodes.west, SHAPES["dense"])
        nodes.east.child.process.kill()
        prompt = prompt_of(14)
        parked = receiving(decoder, prompt, nodes.grant(prompt, expires_at=time.time() + 120.0))
        assert decoder.await_answer(parked) == 0
        assert decoder.outcomes() == {"receive unreachable": 1}
        wait_until(lambda: nodes.status(nodes.west)["receiving"] == 0)


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


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ("not begun", "rejected"),
        ("arriving", "rejected"),
        ("here", "rejected"),
        ("here", "wrong_length"),
        ("arriving", "wrong_role"),
    ],
)
def test_a_refused_decode_leg_releases_its_transfer(nodes: Nodes, stage: str, word: Outcome) -> None:
    """The grant would end in an hour."""
    prefiller = nodes.start(nodes.east, SHAPES["recurrent"])
    decoder = nodes.start(
        nodes.west, SHAPES["recurrent"], directions=("send",) if word == "wrong_role" else ("receive",)
    )
    prompt = prompt_of(38)
    grant = nodes.grant(prompt, expires_at=time.time() + 3600.0)
    tokens = {"rejected": [0], "wrong_length": prompt[:-1], "wrong_role": prompt}[word]

    def refuse() -> None:
        parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
        refused = decoder.submit("refused", tokens, parameters, excluded="rejected" if word == "rejected" else None)
        assert decoder.await_answer(refused) == 0
        decoder.finish(refused)

    if stage == "not begun":
        refuse()
    prefilling = sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    if stage == "arriving":
        prefiller.step([(prefilling, 100)])
        wait_until(lambda: nodes.status(nodes.west)["receiving"] == 1)
        refuse()
    if stage != "here":
        wait_until(
            lambda: prefiller.step([]) and prefiller.outcomes() == {"send cancelled": 1}, what="the cancellation"
        )
    prefiller.prefill(prefilling, chunk_tokens=100)
    if stage == "here":
        wait_until(lambda: _has_come(nodes, grant), what="the transfer")
        refuse()
    prefiller.finish(prefilling)
    nodes.assert_nothing_is_left()
    assert decoder.outcomes() == {f"receive {word}": 1}
    assert prefiller.outcomes() == {"send completed" if stage == "here" else "send cancelled": 1}


def _has_come(nodes: Nodes, grant: str) -> bool:
    name = grants.unverified(grants.from_text(grant)).transfer_id.hex()
    transfers = get_json(f"{nodes.west.status_url}/transfers")
    return any((transfer["transfer_id"], transfer["outcome"]) == (name, "completed") for transfer in transfers)


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
    _send(prefiller, prompt, grant)
    assert decoder.await_answer(parked) == NUM_TOKENS
    assert decoder.load(parked, NUM_TOKENS)
    assert decoder.wrong_blocks(parked, NUM_TOKENS) == []
    decoder.finish(parked)
    nodes.assert_nothing_is_left()


def _send(prefiller: FakeEngine, prompt: Sequence[int], grant: str, *, chunk_tokens: int = 100) -> None:
    prefilling = sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.prefill(prefilling, chunk_tokens=chunk_tokens)
    prefiller.finish(prefilling)


@pytest.mark.parametrize("flag", ["do_remote_prefill", "do_remote_decode"])
def test_transfers_of_other_connectors_are_ignored(nodes: Nodes, flag: str) -> None:
    """Under MultiConnector the answer has no keys of this connector, and no prefix replaces the KV of the other."""
    engine = nodes.start(nodes.west, SHAPES["dense"], reuse=True, reuse_min_tokens=1)
    running = engine.submit("r", prompt_of(35), {flag: True, "remote_engine_id": "e"})
    assert engine.await_answer(running) == 0
    assert ("reuse no_prefix" in engine.outcomes()) == (flag == "do_remote_decode")
    finished = engine.scheduler.on_finished("r", lambda: None, list)
    assert finished.params is None


def test_a_request_without_parameters_does_not_touch_the_agent(nodes: Nodes) -> None:
    decoder = nodes.start(nodes.west, SHAPES["dense"])
    assert decoder.scheduler.num_external_tokens(decoder.submit("d", prompt_of(19), {}).request_id, 0) == 0
    assert decoder.outcomes() == {}


# Attention is reused at block boundaries, a window at the boundary where its request ended, a state at its exact length.
STORED_AND_REUSED = [("dense", 301, 288), ("windowed", 320, 320), ("recurrent", 301, 301), ("checkpointed", 301, 301)]


@pytest.mark.parametrize(("shape", "stored", "reused"), STORED_AND_REUSED)
def test_the_next_request_reuses_stored_blocks_even_after_a_restart(
    nodes: Nodes, shape: str, stored: int, reused: int
) -> None:
    first = nodes.start(nodes.west, SHAPES[shape], reuse=True, reuse_min_tokens=16)
    turn = first.submit("turn 1", prompt_of(20, stored), {})
    assert first.await_answer(turn) == 0
    first.prefill(turn, chunk_tokens=64)
    first.finish(turn, leaves=True)
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
    wait_until(lambda: _last_sent(nodes)["outcome"] == "completed")
    assert _last_sent(nodes)["payload_bytes"] == 5 * 2048 + 5041
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
    turn = engine.submit("turn 1", prompt_of(21), {})
    assert engine.await_answer(turn) == 0
    engine.prefill(turn, chunk_tokens=64)
    engine.finish(turn, leaves=True)
    again, granted = prompt_of(21, NUM_TOKENS + 60), {"do_remote_decode": True}
    foreign = nodes.grant(again, tenant="them", source=AgentName("west"), destination=AgentName("east"))
    request = engine.submit("turn 2 of theirs", again[:-1], granted | {"prfaas_grant": foreign})
    assert engine.await_answer(request) == 0
    assert engine.await_answer(engine.submit("turn 2 of ours", again, {})) == NUM_TOKENS + 1
    assert engine.await_answer(engine.submit("salted", again, {}, salt="them")) == 0
    assert engine.await_answer(engine.submit("salted as we are", again, {}, salt="us")) == NUM_TOKENS + 1

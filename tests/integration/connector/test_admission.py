"""Engine blocks of decode requests: allocated when the KV is there, at once, or at once while blocks are plentiful."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from tests.support.agent_nodes import NUM_TOKENS, Nodes, prompt_of, receiving, sending
from tests.support.fake_engine import NUM_BLOCKS, SHAPES, FakeEngine, Running
from tests.support.paused_process import paused
from tests.support.waiting import wait_until

PROMPT = prompt_of(1)


def _preallocated(decoder: FakeEngine, grant: str) -> Running:
    """Return a request that has blocks before its KV has left the prefill engine."""
    running = receiving(decoder, PROMPT, grant)
    assert decoder.scheduler.num_external_tokens(running.request_id, 0) == NUM_TOKENS
    decoder.allocate(running, NUM_TOKENS)
    assert decoder.step([]) == (set(), set())
    assert decoder.num_free_blocks < NUM_BLOCKS - 1
    return running


def _prefill(prefiller: FakeEngine, grant: str) -> None:
    running = sending(prefiller, PROMPT, grant)
    prefiller.await_answer(running)
    prefiller.prefill(running, chunk_tokens=100)
    prefiller.finish(running)


def _await_load(decoder: FakeEngine) -> tuple[set[str], set[str]]:
    """Return the loads that end next, and the failed ones among them."""
    ended: Sequence[tuple[set[str], set[str]]] = []

    def some_end() -> bool:
        nonlocal ended
        ended = [result for result in [decoder.step([])] if result[0]]
        return bool(ended)

    wait_until(some_end, what="the end of a load")
    return ended[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_preallocated_blocks_are_filled_when_the_kv_comes(nodes: Nodes, shape: str) -> None:
    prefiller = nodes.start(nodes.east, SHAPES[shape])
    decoder = nodes.start(nodes.west, SHAPES[shape], admission="preallocate")
    grant = nodes.grant(PROMPT)
    running = _preallocated(decoder, grant)
    _prefill(prefiller, grant)
    assert _await_load(decoder) == ({running.request_id}, set())
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []
    decoder.finish(running)
    assert decoder.outcomes() == {"receive completed": 1}
    assert decoder.num_free_blocks == NUM_BLOCKS - 1
    nodes.assert_nothing_is_left()


def test_a_prefix_from_the_pool_gets_no_preallocated_blocks(nodes: Nodes) -> None:
    """It comes within a moment or never, and an engine may fail a request whose blocks stay empty."""
    engine = nodes.start(nodes.west, SHAPES["dense"], admission="preallocate", reuse=True, reuse_min_tokens=16)
    first = engine.submit("first", PROMPT, {})
    assert engine.await_answer(first) == 0
    engine.prefill(first, chunk_tokens=100)
    engine.finish(first, leaves=True)
    again = engine.submit("again", PROMPT, {})
    wait_until(lambda: engine.scheduler.poll(0.01) and engine.scheduler._offered_tokens("again"), what="an answer")
    with paused(nodes.west.child.process.pid):
        assert engine.scheduler.num_external_tokens("again", 0) is None
    assert engine.await_answer(again) == 288
    engine.finish(again)
    nodes.assert_nothing_is_left()


def test_a_dying_agent_fails_the_load_of_preallocated_blocks(mortal_nodes: Nodes) -> None:
    decoder = mortal_nodes.start(mortal_nodes.west, SHAPES["dense"], admission="preallocate")
    running = _preallocated(decoder, mortal_nodes.grant(PROMPT))
    os.kill(mortal_nodes.west.child.process.pid, signal.SIGKILL)
    assert _await_load(decoder) == ({running.request_id}, {running.request_id})
    assert decoder.outcomes() == {"receive agent_lost": 1}


def test_auto_preallocates_only_while_blocks_are_plentiful(nodes: Nodes) -> None:
    prefiller = nodes.start(nodes.east, SHAPES["dense"])
    decoder = nodes.start(nodes.west, SHAPES["dense"], admission="auto")
    grant = nodes.grant(PROMPT)
    running = receiving(decoder, PROMPT, grant)
    others = [decoder._free.pop() for _ in range(NUM_BLOCKS // 2 + 1)]
    assert decoder.scheduler.num_external_tokens(running.request_id, 0) is None
    decoder._free += others
    assert decoder.scheduler.num_external_tokens(running.request_id, 0) == NUM_TOKENS
    decoder.allocate(running, NUM_TOKENS)
    _prefill(prefiller, grant)
    assert _await_load(decoder) == ({running.request_id}, set())
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []

"""An engine that is told to forget: its agent does, and what was under way goes without it."""

from __future__ import annotations

import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.transfer_report import SENT_KEY
from tests.support.agent_nodes import NUM_TOKENS, Nodes, prompt_of, receiving, sending
from tests.support.fake_engine import NUM_BLOCKS, SHAPES, FakeEngine, Running
from tests.support.paused_process import paused
from tests.support.waiting import wait_until

REUSES = {"reuse": True, "reuse_min_tokens": 16}


def _turn(engine: FakeEngine, prompt: list[int], name: str) -> Running:
    """Compute a prompt and leave it in the pool."""
    turn = engine.submit(name, prompt, {})
    engine.await_answer(turn)
    engine.prefill(turn, chunk_tokens=64)
    engine.finish(turn, leaves=True)
    return turn


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_left_before_is_not_taken_up_and_what_is_left_afterwards_is(nodes: Nodes, shape: str) -> None:
    engine = nodes.start(nodes.west, SHAPES[shape], **REUSES)
    beside = nodes.start(nodes.west, SHAPES[shape], **REUSES)
    prompt, longer = prompt_of(1, 320), prompt_of(1, 380)
    _turn(engine, prompt, "before")
    assert engine.await_answer(engine.submit("found", longer, {})) == 320
    assert engine.scheduler.reset(nodes.model)
    assert engine.await_answer(engine.submit("lost", longer, {})) == 0
    assert beside.await_answer(beside.submit("lost beside it", longer, {})) == 0
    _turn(beside, prompt, "after")
    again = engine.submit("again", longer, {})
    assert engine.await_answer(again) == 320
    assert engine.load(again, 320)
    assert engine.wrong_blocks(again, 320) == []


def test_what_is_under_way_at_each_stage_goes_without_and_leaves_nothing(nodes: Nodes) -> None:
    shape = SHAPES["recurrent"]
    prefiller, decoder = nodes.start(nodes.east, shape), nodes.start(nodes.west, shape, **REUSES)
    _turn(decoder, prompt_of(2), "left")
    claimed_prompt, half_prompt = prompt_of(3), prompt_of(4)
    claimed = receiving(decoder, claimed_prompt, nodes.grant(claimed_prompt))
    half_grant = nodes.grant(half_prompt)
    waiting, half = receiving(decoder, half_prompt, half_grant), sending(prefiller, half_prompt, half_grant)
    prefiller.await_answer(half)
    prefiller.step([(half, 100)])
    held = decoder.submit("held", prompt_of(2, NUM_TOKENS + 60), {})
    assert decoder.await_answer(held) == NUM_TOKENS + 1
    asked = decoder.submit("asked", prompt_of(2, NUM_TOKENS + 61), {})
    assert prefiller.scheduler.reset(nodes.model)
    assert decoder.scheduler.reset(nodes.model)
    for request in (claimed, waiting, held, asked):
        assert decoder.scheduler.num_external_tokens(request.request_id, 0) == 0, request.request_id
    assert prefiller.outcomes() == {"send reset": 1}
    assert decoder.outcomes() == {
        "reuse no_prefix": 1,
        "store completed": 1,
        "receive reset": 2,
        "reuse reset": 2,
    }
    finished = prefiller.scheduler.on_finished(half.request_id, lambda: None, list)
    assert finished.params == {SENT_KEY: "reset"}, "the router learns that nothing comes"
    prefiller.step([])
    nodes.assert_nothing_is_left()


def test_blocks_that_a_finished_request_was_about_to_leave_are_freed(nodes: Nodes) -> None:
    engine = nodes.start(nodes.west, SHAPES["dense"], **REUSES)
    turn = engine.submit("turn", prompt_of(5, 320), {})
    engine.await_answer(turn)
    engine.prefill(turn, chunk_tokens=64)
    chain = HashChain(root_hash(nodes.model), turn.prompt)
    assert engine.scheduler.on_finished("turn", lambda: chain, lambda: turn.tables).keeps_blocks
    engine._kept["turn"] = turn
    assert engine.scheduler.reset(nodes.model)
    engine.step([])
    assert engine.num_free_blocks == NUM_BLOCKS - 1
    assert engine.outcomes()["store reset"] == 1
    assert engine.await_answer(engine.submit("next", prompt_of(5, 380), {})) == 0
    nodes.assert_nothing_is_left()


def test_an_agent_that_hangs_or_is_gone_has_not_forgotten_and_the_next_attempt_succeeds(mortal_nodes: Nodes) -> None:
    engine = mortal_nodes.start(mortal_nodes.west, SHAPES["dense"], **REUSES, silence_seconds=1.0)
    _turn(engine, prompt_of(6, 320), "before")
    with paused(mortal_nodes.west.child.process.pid):
        assert not engine.scheduler.reset(mortal_nodes.model)
    wait_until(lambda: engine.scheduler.reset(mortal_nodes.model), what="the agent that goes on")
    assert engine.await_answer(engine.submit("after", prompt_of(6, 380), {})) == 0
    mortal_nodes.west.child.process.kill()
    mortal_nodes.west.child.process.wait()
    assert not engine.scheduler.reset(mortal_nodes.model)
    mortal_nodes.kill_agent("west")
    wait_until(lambda: engine.scheduler.reset(mortal_nodes.model), what="the new agent")

"""A blocked link: transfer blocks run out, new prefills run without a transfer, and no request waits or loses a block."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_nodes import NUM_TOKENS, Nodes, prompt_of, receiving, running_nodes, sending
from tests.support.fake_engine import SHAPES, FakeEngine, Running
from tests.support.waiting import wait_until
from tools.link import Relay

NUM_REQUESTS = 8  # More than the transfer blocks suffice for.
SHAPE = SHAPES["recurrent"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Yield nodes whose pools have most room for prefix blocks."""
    with running_nodes(tmp_path, pool_bytes="4MiB", transfer_ratio=0.05) as running:
        yield running


def _grant(nodes: Nodes, link: Relay, prompt: Sequence[int], **changes: Any) -> str:
    return nodes.grant(prompt, destination_address=link.address, **changes)


def _transfer(nodes: Nodes, link: Relay, engines: tuple[FakeEngine, FakeEngine], prompt: Sequence[int]) -> None:
    prefiller, decoder = engines
    grant = _grant(nodes, link, prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.prefill(prefilling, chunk_tokens=100)
    prefiller.finish(prefilling)
    _decode(decoder, parked)


def _decode(decoder: FakeEngine, running: Running) -> None:
    assert decoder.await_answer(running) == NUM_TOKENS
    assert decoder.load(running, NUM_TOKENS)
    assert decoder.wrong_blocks(running, NUM_TOKENS) == []
    decoder.finish(running)


def _leave_a_prefix(engine: FakeEngine, prompt: Sequence[int]) -> None:
    running = engine.submit("left", prompt, {})
    engine.await_answer(running)
    engine.prefill(running, chunk_tokens=100)
    engine.finish(running, leaves=True)


def test_prefills_without_transfer_blocks_run_without_a_transfer(nodes: Nodes) -> None:
    prefiller = nodes.start(nodes.east, SHAPE, reuse=True, reuse_min_tokens=16)
    decoder = nodes.start(nodes.west, SHAPE)
    _leave_a_prefix(prefiller, prompt_of(30))
    with Relay(nodes.west.wire) as link:
        _transfer(nodes, link, (prefiller, decoder), prompt_of(31))
        link.hold()
        wait_until(lambda: link.is_held, what="the hold")
        pairs = [(prompt, _grant(nodes, link, prompt)) for prompt in map(prompt_of, range(40, 40 + NUM_REQUESTS))]
        short = _grant(nodes, link, pairs[-1][0], expires_at=time.time() + 1.0)
        decoding = [receiving(decoder, *pair) for pair in [*pairs[:-1], (pairs[-1][0], short)]]
        prefilling = [sending(prefiller, *pair) for pair in pairs]
        for running in prefilling:
            assert prefiller.await_answer(running) == 0
        num_refused = prefiller.outcomes()["send no_memory"]
        num_running = NUM_REQUESTS - num_refused
        assert num_running > 0 and num_refused > 0
        while any(running.computed < NUM_TOKENS for running in prefilling):
            prefiller.step(
                [
                    (running, min(100, NUM_TOKENS - running.computed))
                    for running in prefilling
                    if running.computed < NUM_TOKENS
                ]
            )
        for running in prefilling:
            prefiller.finish(running)
        assert prefiller.outcomes()["send completed"] == 1 + num_running
        link.release()
        for running in decoding[:num_running]:
            _decode(decoder, running)
        assert decoder.await_answer(decoding[-1]) == 0, "the decode side computes it itself"
        for running in decoding[num_running:]:
            decoder.finish(running)
    again = prefiller.submit("again", prompt_of(30, NUM_TOKENS + 60), {})
    assert prefiller.await_answer(again) == NUM_TOKENS + 1, "the prefix that was there before is there"
    assert prefiller.load(again, NUM_TOKENS + 1)
    assert prefiller.wrong_blocks(again, NUM_TOKENS + 1) == []
    prefiller.finish(again)
    nodes.assert_nothing_is_left()

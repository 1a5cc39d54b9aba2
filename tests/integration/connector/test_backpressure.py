"""A blocked link: transfer blocks run out, new prefills run without a transfer, and no request waits or loses a block."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_nodes import (
    NUM_TOKENS,
    Nodes,
    leave_prefix,
    load_and_finish,
    prompt_of,
    receiving,
    reuse_prefix,
    running_nodes,
    sending,
)
from tests.support.fake_engine import SHAPES
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


def test_prefills_without_transfer_blocks_run_without_a_transfer(nodes: Nodes) -> None:
    prefiller = nodes.start(nodes.east, SHAPE, reuse=True, reuse_min_tokens=16)
    decoder = nodes.start(nodes.west, SHAPE)
    leave_prefix(prefiller, prompt_of(30))
    with Relay(nodes.west.wire) as link:
        running = nodes.transfer(prefiller, decoder, prompt_of(31), destination_address=link.address)
        load_and_finish(decoder, running)
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
            load_and_finish(decoder, running)
        assert decoder.await_answer(decoding[-1]) == 0, "the decode side computes it itself"
        for running in decoding[num_running:]:
            decoder.finish(running)
    reuse_prefix(prefiller, prompt_of(30))
    nodes.assert_nothing_is_left()

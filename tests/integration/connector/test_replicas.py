"""Tensor-parallel ranks with equal KV: one copy travels and is stored, and every rank loads it."""

import pytest

from prfaas.agent.engine.client import AgentClient
from tests.support.agent_nodes import Nodes, leave_prefix, load_and_finish, prompt_of, receiving, reuse_prefix
from tests.support.fake_engine import SHAPES, memory_of
from tests.support.waiting import wait_until

NUM_BYTES = 10 * (700 + 1000)  # Ten blocks of 32 tokens in two layers.


def _used_slots(nodes: Nodes) -> list[int]:
    pools = [nodes.status(agent)["pool"] for agent in (nodes.east, nodes.west)]
    return [pool["prefix"] + pool["transfer"] for pool in pools]


@pytest.mark.parametrize(("senders", "readers"), [(8, 1), (1, 8), (8, 8)])
def test_one_copy_travels_and_every_rank_has_it(nodes: Nodes, senders: int, readers: int) -> None:
    prefiller = nodes.start(nodes.east, SHAPES["dense"], num_replicas=senders)
    decoder = nodes.start(nodes.west, SHAPES["dense"], num_replicas=readers)
    before = _used_slots(nodes)
    load_and_finish(decoder, nodes.transfer(prefiller, decoder, prompt_of(1)))
    nodes.assert_nothing_is_left()
    assert nodes.last_sent()["payload_bytes"] == NUM_BYTES
    # The partial last block is of use to this transfer only.
    assert [after - earlier for after, earlier in zip(_used_slots(nodes), before, strict=True)] == [9, 9]


def test_a_prefix_in_the_pool_is_loaded_by_every_rank(nodes: Nodes) -> None:
    engine = nodes.start(nodes.west, SHAPES["recurrent"], num_replicas=4, reuse=True, reuse_min_tokens=16)
    leave_prefix(engine, prompt_of(2))
    reuse_prefix(engine, prompt_of(2))
    nodes.assert_nothing_is_left()


def test_transfers_wait_until_every_rank_is_attached(nodes: Nodes) -> None:
    """A rank that attaches later would read slots that the others have released."""
    memory = memory_of(SHAPES["dense"], model=nodes.model)
    path = str(nodes.west.socket)
    ranks = {"instance": "slow", "role": "worker", "layout": memory.layout, "num_replicas": 2}
    first = AgentClient(path, **ranks)  # type: ignore[arg-type]
    scheduler = AgentClient(path, instance="slow", role="scheduler")
    decoder = nodes.start(nodes.west, SHAPES["dense"])
    decoder.client.close()
    decoder.scheduler._client = scheduler
    receiving(decoder, prompt_of(3), nodes.grant(prompt_of(3)))
    wait_until(lambda: nodes.status(nodes.west)["pending_claims"] == 1, what="the claim")
    second = AgentClient(path, replica=1, **ranks)  # type: ignore[arg-type]
    wait_until(lambda: nodes.status(nodes.west)["pending_claims"] == 0, what="the last rank")
    assert {"slow/worker/0", "slow/worker/0.1"} <= set(nodes.status(nodes.west)["engines"])
    for client in (scheduler, first, second):
        client.close()

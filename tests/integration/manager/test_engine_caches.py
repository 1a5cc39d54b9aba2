"""Device blocks of an engine reach the manager through its agent, and leave with the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import IndexRefusal
from tests.support.agent_deployment import AgentDeployment
from tests.support.deployment import match_request
from tests.support.prefix_engine import BLOCK_TOKENS, MODEL, chain_of
from tests.support.waiting import PATIENCE_SECONDS

kv_events = pytest.importorskip("vllm.distributed.kv_events")

pytestmark = pytest.mark.vllm
NUM_BLOCKS = 5
CHAIN = chain_of(NUM_BLOCKS * BLOCK_TOKENS + 1)


def stored(group: int, blocks: range, hashes: list[int]) -> Any:
    tokens = [position % 50_000 for position in range(blocks.start * BLOCK_TOKENS, blocks.stop * BLOCK_TOKENS)]
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=blocks.start - 1 if blocks.start else None,
        token_ids=tokens,
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
    )


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def publisher(addresses: tuple[str, str]) -> Iterator[Any]:
    made = kv_events.ZmqEventPublisher(0, *addresses)
    yield made
    made.shutdown()


async def gpu_tokens(site: AgentDeployment) -> dict[str, int]:
    request = match_request(CHAIN, model=MODEL)
    request.tiers.append("gpu")
    try:
        return {match.node: match.usable_tokens for match in (await site.client.match(request)).nodes}
    except IndexRefusal:
        return {}


async def until_gpu_tokens(site: AgentDeployment, expected: dict[str, int]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await gpu_tokens(site) != expected:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "instance",
    ["n1-engine", pytest.param("of another name, and the only one of its model", marks=pytest.mark.soak)],
)
async def test_device_blocks_count_for_their_tier_and_leave_with_the_engine(
    site: AgentDeployment, addresses: tuple[str, str], publisher: Any, instance: str
) -> None:
    engine = {"instance": instance, "url": "http://n1", "role": "both", "model": MODEL}
    engine |= {"kv_events": addresses[0], "kv_events_replay": addresses[1]}
    await site.node("n1", engines=json.dumps([engine]))
    everything = [*range(NUM_BLOCKS)]
    window, state = stored(1, range(NUM_BLOCKS), [2, 3]), stored(2, range(NUM_BLOCKS), [3])
    batch = kv_events.KVEventBatch(ts=0.0, events=[stored(0, range(NUM_BLOCKS), everything), window, state])
    await asyncio.to_thread(publisher.publish, batch)
    await until_gpu_tokens(site, {"n1": 4 * BLOCK_TOKENS})
    assert await site.usable(CHAIN) == {}
    await asyncio.to_thread(site.hands.pop("n1").close)
    await until_gpu_tokens(site, {})

"""HTTP contract of KV indexers: registered engines, nodes of the index, and refusals."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from prfaas.manager.daemon import Manager
from tests.support.deployment import MODEL, Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import PATIENCE_SECONDS, until

CHAIN = chain_of(640)
TOKENS = [position % 50_000 for position in range(640)]


async def post(manager: Manager, page: str, body: Any) -> tuple[int, Any]:
    url = f"http://{manager.http_address}/{page}"
    data = io.BytesIO(json.dumps(body).encode())
    async with aiohttp.ClientSession() as session, session.post(url, data=data) as response:
        return response.status, await response.json()


async def instances(manager: Manager, **fields: Any) -> dict[str, Any]:
    status, document = await post(manager, "query", {"model_name": MODEL, "token_ids": TOKENS} | fields)
    assert status == 200, document
    found: dict[str, Any] = document["instances"]
    return found


async def test_node_has_tokens_by_tier_and_usable_tokens(deployment: Deployment) -> None:
    manager = await deployment.start_manager(engine_indexer=True)
    reporter = deployment.reporter("n1", manager)
    deployment.run(reporter)
    reporter.publish([*stored(hybrid_layout(), CHAIN, 160), *stored(hybrid_layout(), CHAIN, 320, state=False)])
    await until(lambda: reporter.status.acknowledged >= 1)
    expected = {"longest_matched": 320, "gpu": 0, "cpu": 320, "disk": 0}
    expected |= {"usable_tokens": 160, "reason": "state", "cluster": "east"}  # type: ignore[dict-item]
    assert await instances(manager) == {"n1": expected}
    question = {"model_name": MODEL, "token_ids": TOKENS, "with_world": True}
    _, asked = await post(manager, "query", question)
    assert asked["world"] == {"usable_tokens": 160, "attention_tokens": 320, "reason": "state"}
    hashes = [unit.hex() for unit in CHAIN.units]
    _, by_hash = await post(manager, "query_by_hash", {"model_name": MODEL, "block_hashes": hashes})
    assert by_hash["instances"] == {"n1": expected}
    adapters = {"lora_name": "adapter"}, {"lora_id": 7}
    inputs = {"mm_hashes": ["image"]}, {"extra_keys": [["image"]]}
    for extra in (*adapters, *inputs, {"cache_salt": "salt"}, {"tenant_id": "other"}, {"model_name": "other"}):
        assert await instances(manager, **extra) == {}, extra
    name = {"instance_id": "n1", "endpoint": "ipc://x", "model_name": MODEL, "block_size": 16}
    status, document = await post(manager, "register", name)
    assert status == 400 and "is the name of a node" in document["error"]


@pytest.mark.vllm
async def test_registered_engine_is_followed_until_unregistered(deployment: Deployment, tmp_path: Path) -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    manager = await deployment.start_manager(engine_indexer=True)
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = kv_events.ZmqEventPublisher(0, events, replay)
    first = kv_events.BlockStored([1, 2, 3], None, TOKENS[:48], 16, None, "GPU", None)
    publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[first]))
    source = {"instance_id": 7, "endpoint": events, "replay_endpoint": replay}
    assert await post(manager, "register", {**source, "model_name": MODEL, "block_size": 16}) == (200, {"status": "ok"})
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await instances(manager) != {"7": {"longest_matched": 48, "gpu": 48, "cpu": 0, "disk": 0}}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await post(manager, "unregister", {"instance_id": 7}) == (200, {"status": "ok"})
    assert await instances(manager) == {}
    await until(lambda: not manager._engine_indexer._index.models(), what="the memory back")
    assert await post(manager, "unregister", {"instance_id": 7}) == (200, {"status": "unknown"})
    await asyncio.to_thread(publisher.shutdown)


@pytest.mark.parametrize(
    ("page", "body", "says"),
    [
        ("query", {"model_name": MODEL}, "token_ids"),
        ("query", {"token_ids": [1]}, "model_name"),
        ("query", {"model_name": MODEL, "token_ids": [-1]}, ""),
        ("query", {"model_name": MODEL, "token_ids": [1.9]}, "token_ids: 1.9 is not an integer"),
        ("query", {"model_name": MODEL, "token_ids": "123"}, "token_ids: write a list"),
        ("query", {"model_name": MODEL, "token_ids": [1], "tenant_id": 5}, "tenant_id: write a text"),
        ("query", {"model_name": 5, "token_ids": [1]}, "model_name: write a text"),
        ("query", {"model_name": MODEL, "token_ids": [1], "with_world": 1}, "with_world: 1; write true or false"),
        ("query", [], "write an object"),
        ("query_by_hash", {"model_name": MODEL, "block_hashes": ["zz"]}, "hexadecimal"),
        ("query_by_hash", {"model_name": MODEL, "block_hashes": ["00"]}, "16 bytes"),
        ("register", {"instance_id": 1, "endpoint": "ipc://x", "model_name": MODEL, "block_size": 17}, "multiple"),
        (
            "register",
            {"instance_id": None, "endpoint": "ipc://x", "model_name": MODEL, "block_size": 16},
            "instance_id",
        ),
        ("register", {"instance_id": "", "endpoint": "ipc://x", "model_name": MODEL, "block_size": 16}, "instance_id"),
        ("register", {"instance_id": 1, "endpoint": "", "model_name": MODEL, "block_size": 16}, "endpoint"),
        ("register", {"instance_id": 1, "endpoint": "n1:5557", "model_name": MODEL, "block_size": 16}, "tcp://"),
        ("register", {"instance_id": 1, "endpoint": "tcp://*:1", "model_name": MODEL, "block_size": 16}, "tcp://"),
    ],
)
async def test_malformed_query_is_refused(deployment: Deployment, page: str, body: Any, says: str) -> None:
    manager = await deployment.start_manager(engine_indexer=True)
    before = _num_refused(page)
    status, document = await post(manager, page, body)
    assert status == 400 and says in document["error"]
    assert _num_refused(page) == before + 1


def _num_refused(page: str) -> float:
    refused = (
        sample for family in REGISTRY.collect() if family.name == "prfaas_manager_refusals" for sample in family.samples
    )
    return sum(sample.value for sample in refused if sample.name.endswith("_total") and sample.labels["call"] == page)


async def test_long_prompts_are_accepted_and_endless_ones_refused(
    deployment: Deployment,
) -> None:
    manager = await deployment.start_manager(engine_indexer=True)
    assert await instances(manager, token_ids=[199_999] * (1 << 18)) == {}
    status, document = await post(manager, "query", {"model_name": MODEL, "token_ids": "1" * (17 << 20)})
    assert status == 413 and "longer than" in document["error"]


async def test_pages_are_served_only_if_enabled(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    async with aiohttp.ClientSession() as session, session.post(f"http://{manager.http_address}/query") as response:
        assert response.status in (404, 405)

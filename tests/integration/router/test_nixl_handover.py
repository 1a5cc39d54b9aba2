"""NIXL hand-over within a cluster: prefill first, then decode with the prefill engine's parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.router.door import LONG, SHORT, STREAMED, STREAMED_CHAT, Door, make_door
from tests.integration.router.paced_engine import MODEL
from tests.support.waiting import until

KEPT = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 1}


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with make_door(one_cluster=True, local_policy="pd", pd_protocol="nixl") as made:
        made.east.keeps = KEPT
        yield made


@pytest.mark.parametrize(
    ("path", "asked", "streamed"),
    [
        ("/v1/completions", {"prompt": SHORT}, STREAMED),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SHORT}]}, STREAMED_CHAT),
    ],
)
async def test_prefill_parameters_go_to_decode_with_the_clients_request(
    door: Door, path: str, asked: dict[str, Any], streamed: bytes
) -> None:
    whole = asked | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7, "stop": "x"}
    status, body, headers = await door.post(whole, path=path)
    assert (status, body, headers["x-prfaas-route"], headers["x-prfaas-reason"]) == (200, streamed, "remote", "pd")
    (prefill,), (decode,) = door.east.bodies, door.west.bodies
    assert {name: prefill[name] for name in asked} == asked
    assert (prefill["max_tokens"], prefill["stream"], "stream_options" in prefill) == (1, False, False)
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        **dict.fromkeys(KEPT),
    }
    assert decode == {"model": MODEL, **whole, "kv_transfer_params": KEPT}
    assert len(set(door.east.request_ids + door.west.request_ids)) == 1


async def test_decode_leg_follows_the_prefill_leg_and_a_disconnect_ends_both(door: Door) -> None:
    door.east.hangs = True
    asking = asyncio.create_task(door.post({"prompt": SHORT}))
    await until(lambda: len(door.east.bodies) == 1)
    assert door.west.bodies == []
    asking.cancel()
    await until(lambda: door.east.num_broken_off == 1)
    assert door.west.bodies == []


@pytest.mark.parametrize(
    ("status", "keeps", "fallback"),
    [(200, None, "prefill_without_transfer"), (200, {}, "prefill_without_transfer"), (503, KEPT, "prefill_error")],
)
async def test_decode_engine_computes_everything_if_no_kv_was_kept(
    door: Door, status: int, keeps: dict[str, Any] | None, fallback: str
) -> None:
    door.east.status, door.east.keeps = status, keeps
    answered, _, headers = await door.post({"prompt": SHORT})
    assert (answered, headers["x-prfaas-fallback"]) == (200, fallback)
    assert [body.get("kv_transfer_params") for body in door.west.bodies] == [None]


async def test_decode_engine_that_cannot_fetch_is_retried_without_the_hand_over(door: Door) -> None:
    door.west.refuses_transfers = True
    answered, _, headers = await door.post({"prompt": SHORT})
    assert (answered, headers["x-prfaas-fallback"]) == (200, "decode_error")
    assert [body.get("kv_transfer_params") for body in door.west.bodies] == [KEPT, None]


async def test_another_cluster_still_prefills_under_a_grant() -> None:
    async with make_door(pd_protocol="nixl") as door:
        await door.post({"prompt": LONG})
        for engine in (door.east, door.west):
            assert "prfaas_grant" in engine.bodies[0]["kv_transfer_params"]

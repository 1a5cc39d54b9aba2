"""NIXL hand-over within a cluster: prefill first, then decode with the prefill engine's parameters."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.paced_engine import MODEL
from tests.support.router import LONG, SHORT, STREAMED, RunningRouter, running_router
from tests.support.waiting import until

KEPT = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 1}


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router(one_cluster=True, local_policy="pd", pd_protocol="nixl") as made:
        made.east.keeps = KEPT
        yield made


async def test_prefill_parameters_go_to_decode_with_the_clients_request(router: RunningRouter) -> None:
    asked = {"prompt": SHORT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7}
    status, body, headers = await router.post(asked)
    assert (status, body, headers["x-prfaas-route"], headers["x-prfaas-reason"]) == (200, STREAMED, "remote", "pd")
    (prefill,), (decode,) = router.east.bodies, router.west.bodies
    assert (prefill["max_tokens"], prefill["stream"], "stream_options" in prefill) == (1, False, False)
    assert decode == {"model": MODEL, **asked, "kv_transfer_params": KEPT}


async def test_decode_leg_follows_the_prefill_leg_and_a_disconnect_ends_both(router: RunningRouter) -> None:
    router.east.hangs = True
    asking = asyncio.create_task(router.post({"prompt": SHORT}))
    await until(lambda: len(router.east.bodies) == 1)
    assert router.west.bodies == []
    asking.cancel()
    await until(lambda: router.east.num_broken_off == 1)
    assert router.west.bodies == []


@pytest.mark.parametrize(
    ("status", "keeps", "fallback"),
    [(200, None, "prefill_without_transfer"), (200, {}, "prefill_without_transfer"), (503, KEPT, "prefill_error")],
)
async def test_decode_engine_computes_everything_if_no_kv_was_kept(
    router: RunningRouter, status: int, keeps: dict[str, Any] | None, fallback: str
) -> None:
    router.east.status, router.east.keeps = status, keeps
    answered, _, headers = await router.post({"prompt": SHORT})
    assert (answered, headers["x-prfaas-fallback"]) == (200, fallback)
    assert [body.get("kv_transfer_params") for body in router.west.bodies] == [None]


async def test_another_cluster_still_prefills_under_a_grant() -> None:
    async with running_router(pd_protocol="nixl") as router:
        await router.post({"prompt": LONG})
        for engine in (router.east, router.west):
            assert "prfaas_grant" in engine.bodies[0]["kv_transfer_params"]

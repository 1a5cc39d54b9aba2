"""Failures behind the router: retried before the first token, and an aborted answer afterwards."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from prfaas.router.engines import fleet
from prfaas.router.openai.request import error_body
from prfaas.transfer_report import SENT_KEY
from tests.support.paced_engine import PacedEngine
from tests.support.router import LONG, SHORT, STREAMED, STREAMED_CHAT, RunningRouter, running_router
from tests.support.waiting import PATIENCE_SECONDS, until


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as made:
        yield made


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("error", "prefill_error"),
        ("gone", "prefill_unreachable"),
        ("reset", "prefill_broke_off"),
        ("garbled", "prefill_broke_off"),
        ("hang", "prefill_late"),
    ],
)
async def test_failed_prefill_falls_back_to_the_decode_engine(failure: str, reason: str) -> None:
    deadline = 0.5 if failure == "hang" else PATIENCE_SECONDS
    async with running_router(transfer_deadline=deadline, probe_interval=3600.0) as router:
        router.west.holds_transfers = True  # Like an engine that waits for its KV.
        if failure == "error":
            router.east.status = 500
        elif failure == "gone":
            await router.east.stop()
        elif failure == "garbled":
            router.east.garbles = True
        else:
            router.east.hangs = True
        answering = asyncio.create_task(router.post({"prompt": LONG, "stream": True}))
        if failure == "reset":
            await until(lambda: router.east.bodies)
            await router.east.stop()
        status, body, headers = await answering
        assert (status, body) == (200, STREAMED)
        assert (headers["x-prfaas-route"], headers["x-prfaas-fallback"]) == ("remote", reason)
        *before, last = [sent["kv_transfer_params"] for sent in router.west.bodies]
        transfer_id = headers["x-prfaas-transfer"]
        assert last == {"prfaas_fallback": {"transfer_id": transfer_id, "reason": reason}}
        assert len(before) <= 1, "the first decode leg may have ended on its way"
        await until(lambda: router.west.num_broken_off == len(before), what="the first decode leg's end")
        _, record = await router.get(f"/debug/decision/{headers['x-request-id']}")
        assert reason in record["explanation"]


async def test_prefill_engine_that_refuses_connections_gets_no_further_request() -> None:
    async with running_router(probe_interval=3600.0) as router:
        await router.east.stop()
        await router.post({"prompt": LONG})
        _, _, headers = await router.post({"prompt": LONG})
        assert (headers["x-prfaas-route"], headers["x-prfaas-reason"]) == ("local", "no_prefill_instance")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_that_keeps_failing_is_left_alone_and_then_tried_again(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "BREAKER_FAILURES", 2)
    monkeypatch.setattr(fleet, "BREAKER_SECONDS", 1.0)
    async with running_router(num_wests=2) as router:
        failing, prompt = (router.east, LONG) if role == "prefill" else (router.west, SHORT)
        failing.status = 500
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await _is_left_alone(router, prompt, failing):
                pass
            failing.status = 200
            while not await _asked(router, prompt, failing):
                pass


@pytest.mark.parametrize(("sent", "is_left_alone"), [("agent_lost", True), ("unreachable", False)])
async def test_breaker_blames_a_prefill_engine_for_its_own_agent_only(
    sent: str, is_left_alone: bool, open_at_once: None
) -> None:
    async with running_router() as router:
        router.west.holds_transfers, router.east.keeps = True, {SENT_KEY: sent}
        _, _, headers = await router.post({"prompt": LONG})
        assert headers["x-prfaas-fallback"] == "prefill_without_transfer"
        _, _, headers = await router.post({"prompt": LONG})
        assert headers["x-prfaas-reason"] == ("no_prefill_instance" if is_left_alone else "long")


async def _asked(router: RunningRouter, prompt: str, engine: PacedEngine) -> bool:
    """Return whether one more request, which is answered whole, reaches this engine."""
    before = len(engine.bodies)
    status, body, _ = await router.post({"prompt": prompt, "stream": True})
    assert (status, body) == (200, STREAMED)
    return len(engine.bodies) > before


async def _is_left_alone(router: RunningRouter, prompt: str, engine: PacedEngine) -> bool:
    """Return whether it has failed twice and none of the next requests reaches it."""
    asked = [await _asked(router, prompt, engine) for _ in range(4)]
    return len(engine.bodies) >= 2 and not any(asked)


async def test_only_decode_engine_is_asked_however_often_it_fails(open_at_once: None) -> None:
    async with running_router() as router:
        router.west.status = 500
        for number in range(1, 4):
            assert (await router.post({"prompt": SHORT}))[0] == 500
            assert len(router.west.bodies) >= number
        router.west.status = 200
        assert (await router.post({"prompt": SHORT}))[0] == 200


async def test_decode_engine_that_refuses_the_transfer_is_retried_without_it(router: RunningRouter) -> None:
    router.west.refuses_transfers = True
    status, body, headers = await router.post({"prompt": LONG, "stream": True})
    assert (status, body, headers["x-prfaas-fallback"]) == (200, STREAMED, "decode_error")


@pytest.mark.parametrize(
    ("path", "prompt", "answer"),
    [
        ("/v1/completions", {"prompt": LONG}, STREAMED),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, STREAMED_CHAT),
    ],
)
async def test_stream_that_begins_with_an_error_is_retried_without_the_transfer(
    router: RunningRouter, path: str, prompt: dict[str, Any], answer: bytes
) -> None:
    router.west.fails_loads, router.west.token_seconds = True, 0.05  # Events then come one by one.
    status, body, headers = await router.post({**prompt, "stream": True}, path=path)
    assert (status, body, headers.get("x-prfaas-fallback")) == (200, answer, "decode_error")


async def test_failed_decode_leg_ends_the_prefill_leg(router: RunningRouter) -> None:
    router.west.refuses_transfers = True
    router.east.hangs = True
    await router.post({"prompt": LONG, "stream": True})
    await until(lambda: router.east.num_broken_off == 1)


async def test_request_rejected_by_the_decode_engine_is_not_prefilled_further(router: RunningRouter) -> None:
    router.west.status, router.east.hangs = 400, True
    status, _, headers = await router.post({"prompt": list(LONG.encode())})
    assert (status, headers["x-prfaas-route"]) == (400, "remote")
    await until(lambda: router.east.num_broken_off == 1)


@pytest.mark.parametrize("failure", ["gone", "error"])
@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_another_decode_engine_takes_over_from_a_failed_one(failure: str, prompt: str) -> None:
    async with running_router(num_wests=2, probe_interval=3600.0) as router:
        if failure == "gone":
            await router.west.stop()
        else:
            router.west.status = 500
        status, body, headers = await router.post({"prompt": prompt, "stream": True})
        assert (status, body) == (200, STREAMED)
        _, record = await router.get(f"/debug/decision/{headers['x-request-id']}")
        assert record["decode"] == "west/1" or prompt == LONG


async def test_error_of_all_engines_reaches_the_client_unchanged() -> None:
    async with running_router(num_wests=2) as router:
        for engine in router.wests:
            engine.status = 500
        status, body, headers = await router.post({"prompt": SHORT})
        assert (status, body) == (500, b'{"error": {"message": "planned"}}')
        assert headers["x-prfaas-reason"] == "short"
        assert [len(engine.bodies) for engine in router.wests] == [1, 1]


async def test_failure_after_the_first_token_aborts_the_answer(router: RunningRouter) -> None:
    router.west.break_after_tokens = 1
    router.west.token_seconds = 0.05
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await router.post({"prompt": LONG, "stream": True})
    assert len(router.west.bodies) == 1, "nothing is sent again after a token"


@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_client_that_disconnects_before_the_first_token_ends_every_leg(
    router: RunningRouter, prompt: str
) -> None:
    router.east.hangs = router.west.hangs = True
    asking = asyncio.create_task(router.post({"prompt": prompt, "stream": True}, **{"x-request-id": "gone"}))
    await until(lambda: router.west.bodies and (prompt == SHORT or router.east.bodies))
    asking.cancel()
    await until(lambda: router.west.num_broken_off == 1)
    await until(lambda: prompt == SHORT or router.east.num_broken_off == 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await router.get("/debug/decision/gone"))[1]["status"] != 499:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


async def test_client_that_disconnects_during_the_answer_ends_the_decode_leg(router: RunningRouter) -> None:
    router.west.token_seconds = 3600.0
    body = {"prompt": SHORT, "stream": True}
    async with router.session.post(f"{router.url}/v1/completions", json=body) as response:
        await response.content.readany()
        response.close()
    await until(lambda: router.west.num_broken_off == 1)


async def test_forwarded_request_without_an_engine_gets_503(router: RunningRouter) -> None:
    await router.west.stop()
    status, body, _ = await router.post({"input": "x"}, path="/v1/embeddings")
    assert status == 503 and body == error_body("no engine is ready", kind="service_unavailable", code=503)


async def test_errors_on_forwarded_paths_leave_the_engine_its_completions(open_at_once: None) -> None:
    async with running_router(num_wests=2) as router:
        for engine in router.wests:
            engine.status = 501
        assert (await router.post({"query": "x"}, path="/v1/rerank"))[0] == 501
        (failed,) = [engine for engine in router.wests if engine.bodies]
        for engine in router.wests:
            engine.status = 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await _asked(router, SHORT, failed):
                pass


async def test_unhealthy_prefill_engine_gets_no_requests(router: RunningRouter) -> None:
    router.east.healthy = False
    await router.until_health(east_0=False)
    _, _, headers = await router.post({"prompt": LONG})
    assert headers["x-prfaas-reason"] == "no_prefill_instance"


async def test_engine_that_answers_the_second_health_check_keeps_its_requests() -> None:
    async with running_router(num_wests=2, silence_seconds=2.0) as router:
        for engine in router.wests:
            engine.prefill_seconds = 3.5
        asking = asyncio.create_task(router.post({"prompt": SHORT}))
        await until(lambda: any(engine.bodies for engine in router.wests))
        busy = next(number for number, engine in enumerate(router.wests) if engine.bodies)
        router.wests[busy].answers_probes.clear()
        await router.until_health(**{f"west_{busy}": False})
        router.wests[busy].answers_probes.set()
        assert (await asking)[0] == 200
        assert [len(engine.bodies) for engine in router.wests] == [1 - busy, busy]


async def test_engine_that_goes_on_streaming_is_not_silent() -> None:
    """A busy engine may be late with its health checks."""
    async with running_router(silence_seconds=1.0) as router:
        router.west.token_seconds = 0.6
        before = _silences()
        asking = asyncio.create_task(router.post({"prompt": SHORT, "stream": True}))
        await until(lambda: router.west.bodies)
        router.west.answers_probes.clear()
        assert (await asking)[1] == STREAMED
        router.west.answers_probes.set()
        assert _silences() == before


def _silences() -> float:
    return REGISTRY.get_sample_value("prfaas_router_engine_silences_total", {"engine": "west/0"}) or 0.0


async def test_answer_that_does_not_end_in_time_is_aborted() -> None:
    async with running_router(request_timeout=1.5) as router:
        router.west.token_seconds = 3600.0
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
            await router.post({"prompt": SHORT, "stream": True})

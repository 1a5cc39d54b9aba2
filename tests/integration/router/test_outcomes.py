"""Outcome of each request: everything that is asked counts once, with its status, route and outcome."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from prfaas.transfer_report import ReceivedReport
from tests.support.router import LONG, SHORT, STREAMED, RunningRouter, counted_requests, running_router
from tests.support.waiting import until


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as made:
        yield made


class _Counted:
    """Block after which exactly one more request is counted, with these labels."""

    def __init__(self, status: int, route: str, outcome: str) -> None:
        self._labels = (status, route, outcome)

    async def __aenter__(self) -> None:
        self._before, self._all_before = counted_requests(*self._labels), _all_requests()

    async def __aexit__(self, *error: object) -> None:
        await until(lambda: _all_requests() > self._all_before, what="the count")
        assert counted_requests(*self._labels) - self._before == 1, self._labels
        assert _all_requests() - self._all_before == 1


def _all_requests() -> float:
    metrics = [metric for metric in REGISTRY.collect() if metric.name == "prfaas_router_requests"]
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name.endswith("_total"))


@pytest.mark.parametrize(
    ("path", "body", "status", "route", "outcome"),
    [
        ("/v1/completions", {"prompt": SHORT}, 200, "local", "completed"),
        ("/v1/completions", {"prompt": LONG}, 200, "remote", "completed"),
        ("/v1/completions", {}, 400, "none", "refused"),
        ("/v1/embeddings", {"input": "x"}, 200, "forwarded", "completed"),
        ("/v1/load_lora_adapter", {}, 403, "forwarded", "refused"),
        ("/unheard-of", {}, 404, "none", "refused"),
    ],
)
async def test_answer_counts_by_status_and_route(
    router: RunningRouter, path: str, body: dict[str, Any], status: int, route: str, outcome: str
) -> None:
    async with _Counted(status, route, outcome):
        assert (await router.post(body, path=path))[0] == status


async def test_malformed_http_counts_as_refused(router: RunningRouter) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    async with _Counted(400, "none", "refused"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"nonsense\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_pages_of_operators_do_not_count(router: RunningRouter) -> None:
    async with _Counted(200, "local", "completed"):
        await router.get("/health")
        await router.post({"prompt": SHORT})


async def test_client_that_leaves_counts_as_cancelled(router: RunningRouter) -> None:
    router.west.hangs = True
    async with _Counted(499, "local", "cancelled"):
        asking = asyncio.create_task(router.post({"prompt": SHORT}))
        await until(lambda: router.west.bodies)
        asking.cancel()


async def test_client_that_leaves_a_stream_counts_as_cancelled(router: RunningRouter) -> None:
    router.west.token_seconds = 0.3
    async with _Counted(499, "local", "cancelled"):
        body = {"prompt": SHORT, "stream": True}
        async with router.session.post(f"{router.url}/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()


async def test_stream_that_breaks_off_counts_as_broken(router: RunningRouter) -> None:
    router.west.break_after_tokens = 1
    async with _Counted(200, "local", "broken"):
        with pytest.raises(aiohttp.ClientError):
            await router.post({"prompt": SHORT, "stream": True})


async def test_failed_prefill_leg_counts_as_a_fallback(router: RunningRouter) -> None:
    router.east.refuses_transfers = router.west.holds_transfers = True
    async with _Counted(200, "remote", "fell_back"):
        assert (await router.post({"prompt": LONG}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("transfer", "outcome"), [("completed", "completed"), ("no_memory", "fell_back")])
async def test_decode_engines_report_decides_the_outcome(
    router: RunningRouter, stream: bool, transfer: Any, outcome: str
) -> None:
    router.west.reports = lambda transfer_id: ReceivedReport(transfer_id, transfer, 200).to_params()
    fallbacks = _fallbacks(transfer)
    async with _Counted(200, "remote", outcome):
        _, answer, headers = await router.post({"prompt": LONG, "stream": stream})
        assert b"prfaas_received" not in answer or not stream, "the comment is not for clients"
        assert json.loads(answer)["usage"] if not stream else answer.endswith(b"data: [DONE]\n\n")
    _, record = await router.get(f"/debug/decision/{headers['x-request-id']}")
    assert (record["transfer"], record["transferred_tokens"], record["outcome"]) == (transfer, 200, outcome)
    assert record["fallback"] == (None if outcome == "completed" else transfer)
    assert _fallbacks(transfer) - fallbacks == (outcome == "fell_back")


async def test_report_before_the_first_token_of_a_stream_is_recorded(router: RunningRouter) -> None:
    router.west.reports_first, router.west.token_seconds = True, 0.05
    router.west.reports = lambda transfer_id: ReceivedReport(transfer_id, "checksum", 200).to_params()
    async with _Counted(200, "remote", "fell_back"):
        _, answer, _ = await router.post({"prompt": LONG, "stream": True})
        assert answer == STREAMED


def _fallbacks(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_router_fallbacks_total", {"reason": reason}) or 0.0

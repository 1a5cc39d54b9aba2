"""Client of several managers: skips those that are gone or hang, and refuses invalid timeouts."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.router.routing import reports
from prfaas.router.routing.reports import RequestReports
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY
from tests.integration.manager.scripted_manager import scripted_manager
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.free_ports import free_address


async def test_operators_call_goes_to_the_live_manager(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    client = ManagerClient(
        [free_address(), manager.address], name="operator", secret=SECRET, deadline_seconds=PATIENCE_SECONDS
    )
    with pytest.raises(IndexRefusal, match="nobody is unknown or silent"):
        await client.operate("Undrain", pb.UndrainRequest(node="nobody"))
    await client.close()


async def _say_nothing(request: bytes, context: Any) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_silent_manager_is_left(deployment: Deployment) -> None:
    manager = await deployment.start_manager(name="talks")
    async with scripted_manager(WatchState=grpc.unary_stream_rpc_method_handler(_say_nothing)) as addresses:
        client = ManagerClient([*addresses, manager.address], name="router", secret=SECRET)
        snapshots = client.watch_state()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await anext(snapshots)
        await snapshots.aclose()
        await client.close()


async def test_call_fails_if_every_manager_names_another_writer() -> None:
    async def send_on(request: bytes, context: Any) -> bytes:
        trailing = ((REASON_KEY, "not_writer"), (WRITER_KEY, addresses[1]))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another manager writes", trailing)
        raise AssertionError("abort raises")

    copy = grpc.unary_unary_rpc_method_handler(send_on)
    async with scripted_manager(num_addresses=2, Copy=copy) as addresses:
        client = ManagerClient(addresses, name="router", secret=SECRET)
        with pytest.raises(ManagerUnreachable, match="no longer writes the cluster"):
            await client.copy(pb.CopyRequest(), timeout_seconds=PATIENCE_SECONDS)
        await client.close()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
async def test_invalid_timeout_is_refused(deployment: Deployment, seconds: float) -> None:
    manager = await deployment.start_manager()
    client = deployment.client(manager, name="operator")
    with pytest.raises(IndexRefusal, match="is not a duration"):
        await client.copy(pb.CopyRequest(timeout_seconds=seconds), timeout_seconds=PATIENCE_SECONDS)


ANSWERED = pb.ReportRequestsRequest.Answered(route="local", reason="short", status=200, outcome="completed")


async def test_reports_wait_for_a_manager_that_starts_late(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "INTERVAL_SECONDS", 0.1)
    address = free_address()
    client = ManagerClient([address], name="router", secret=SECRET)
    queue, before = RequestReports(client), _num_completed()
    queue.add(ANSWERED)
    await queue.send()
    sending = asyncio.create_task(queue.send_forever())
    await deployment.start_manager(listen=address)
    await until(lambda: _num_completed() == before + 1, what="the report at the manager")
    await cancel_tasks((sending,))
    await client.close()


async def test_an_unanswered_report_waits_while_later_ones_go_to_another_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent manager may have counted a report, so that no other may count it."""
    monkeypatch.setattr(reports, "ANSWER_SECONDS", 0.3)
    taken: dict[str, list[int]] = {"silent": [], "live": []}
    wakes = asyncio.Event()

    async def take_late(request: bytes, context: Any) -> bytes:
        taken["silent"].append(pb.ReportRequestsRequest.FromString(request).number)
        await wakes.wait()
        return b""

    async def take(request: bytes, context: Any) -> bytes:
        taken["live"].append(pb.ReportRequestsRequest.FromString(request).number)
        return b""

    late, live = (grpc.unary_unary_rpc_method_handler(method) for method in (take_late, take))
    async with scripted_manager(ReportRequests=late) as first, scripted_manager(ReportRequests=live) as second:
        client = ManagerClient([*first, *second], name="router", secret=SECRET)
        queue = RequestReports(client)
        for _ in range(3):
            queue.add(ANSWERED)
            await queue.send()
        assert set(taken["silent"]) == {1}
        assert taken["live"] == [2, 3]
        wakes.set()
        await until(lambda: not queue.num_unanswered, what="the answer to the repeated report")
        assert set(taken["silent"]) == {1}
        assert taken["live"] == [2, 3]
        await client.close()


def test_reports_beyond_the_queue_are_dropped_and_counted() -> None:
    queue = RequestReports(ManagerClient([], name="router", secret=SECRET))
    before = _num("prfaas_router_reports_dropped_total", {})
    for _ in range(reports.MAX_REPORTS + 2):
        queue.add(ANSWERED)
    assert _num("prfaas_router_reports_dropped_total", {}) == before + 2


def _num_completed() -> float:
    labels = {"route": "local", "reason": "short", "outcome": "completed"}
    return _num("prfaas_manager_answered_requests_total", labels)


def _num(metric: str, labels: dict[str, str]) -> float:
    return REGISTRY.get_sample_value(metric, labels) or 0.0

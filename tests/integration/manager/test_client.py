"""Client of several managers: skips those that are gone or hang, and refuses invalid timeouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY
from tests.integration.manager.scripted_manager import scripted_manager
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import PATIENCE_SECONDS
from tools.free_ports import free_address


async def test_operators_call_goes_to_the_live_manager(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    client = ManagerClient(
        [free_address(), manager.address], name="operator", secret=SECRET, deadline_seconds=PATIENCE_SECONDS
    )
    with pytest.raises(IndexRefusal, match="nobody is unknown or silent"):
        await client.undrain(pb.UndrainRequest(node="nobody"))
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


async def test_outcomes_are_counted_once_by_a_manager_that_answers_late(deployment: Deployment) -> None:
    """A report is repeated until the manager has taken it, and its repetition is not counted."""
    address = free_address()
    client = ManagerClient([address], name="router", secret=SECRET)
    answered = pb.ReportRequestsRequest.Answered(route="local", reason="short", status=200, outcome="completed")
    request, before = pb.ReportRequestsRequest(requests=[answered]), _num_completed()
    reporting = asyncio.create_task(client.report_requests(request))
    manager = await deployment.start_manager(listen=address)
    await reporting
    assert _num_completed() == before + 1
    manager.service.report_requests(request)
    assert _num_completed() == before + 1
    await client.report_requests(request)
    assert _num_completed() == before + 2
    await client.close()


def _num_completed() -> float:
    labels = {"route": "local", "reason": "short", "outcome": "completed"}
    return REGISTRY.get_sample_value("prfaas_manager_answered_requests_total", labels) or 0.0

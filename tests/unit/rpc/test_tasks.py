"""What becomes of background tasks."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY

from prfaas import metrics
from prfaas.rpc.tasks import end, lasting
from tests.waiting import until


def _num_ended(name: str) -> float:
    return REGISTRY.get_sample_value("prfaas_manager_tasks_ended_total", {"task": name}) or 0.0


async def _fails() -> None:
    raise ZeroDivisionError("ours")


async def _returns() -> None:
    pass


@pytest.mark.parametrize(("work", "traced"), [(_fails, True), (_returns, False)])
async def test_a_task_that_ends_by_itself_is_logged_and_counted(
    work: object, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = _num_ended("test")
    lasting(work(), name="test", ended=metrics.MANAGER_TASKS_ENDED)  # type: ignore[operator]
    await until(lambda: _num_ended("test") == before + 1)
    (line,) = [record for record in caplog.records if "task.ended" in record.getMessage()]
    assert bool(line.exc_info and line.exc_info[0]) is traced


async def test_a_task_that_is_ended_is_neither() -> None:
    before = _num_ended("test")
    await end((lasting(asyncio.sleep(3600), name="test", ended=metrics.MANAGER_TASKS_ENDED),))
    assert _num_ended("test") == before

"""Background tasks restart and are counted."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from prfaas import metrics
from prfaas.rpc.tasks import cancel_tasks, restarting_task
from tests.support.waiting import until


def _num_ended(name: str) -> float:
    return REGISTRY.get_sample_value("prfaas_manager_tasks_ended_total", {"task": name}) or 0.0


@pytest.mark.parametrize("fails", [True, False])
async def test_ended_task_is_counted_and_restarts(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    before, starts = _num_ended("test"), []

    async def work() -> None:
        starts.append(1)
        if len(starts) == 2:
            await asyncio.Event().wait()
        if fails:
            raise ZeroDivisionError("ours")

    task = restarting_task(work, name="test", ended=metrics.MANAGER_TASKS_ENDED)
    await until(lambda: len(starts) == 2)
    assert _num_ended("test") == before + 1
    (line,) = [record for record in caplog.records if "task.ended" in record.getMessage()]
    assert bool(line.exc_info and line.exc_info[0]) is fails
    await cancel_tasks((task,))


async def test_cancelled_task_is_not_counted() -> None:
    before = _num_ended("test")
    await cancel_tasks((restarting_task(asyncio.Event().wait, name="test", ended=metrics.MANAGER_TASKS_ENDED),))  # type: ignore[arg-type]
    assert _num_ended("test") == before

"""Replays of plans in a child process: it may die, and it ends with the manager."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prfaas.manager.planning.replay import Replay
from prfaas.manager.planning.replay_process import confirm
from prfaas.model.planning.planner import best_plan
from tests.integration.manager.test_planning import FILE, _node
from tests.support.deployment import Deployment, kill
from tests.support.marked_processes import marked_processes
from tests.support.planner_inputs import case_study
from tests.support.waiting import PATIENCE_SECONDS, until


def replay(requests: Any) -> Replay:
    """Return a replay that is due; `requests` is called in the child process."""
    listed, workload = case_study()
    splits = ((listed, best_plan(listed, workload)),) * 2
    return Replay(requests, workload, listed, {"h20": {"decode": 1}}, {"h20": {"decode": 3}}, splits)


@pytest.mark.parametrize(
    ("requests", "seconds", "failure"),
    [
        (list, 0.01, "timeout: no verdict within 0.01 s"),
        (os.abort, PATIENCE_SECONDS, "killed: no message"),
        (partial(int, "x"), PATIENCE_SECONDS, "failed: ValueError: invalid literal for int() with base 10: 'x'"),
    ],
)
async def test_failed_replay_has_a_reason_and_confirms_nothing(requests: Any, seconds: float, failure: str) -> None:
    verdict = await confirm(replay(requests), timeout_seconds=seconds)
    assert (verdict.failure, verdict.ttft_seconds) == (failure, None)
    assert verdict.needed_instances == {"h20": {"decode": 3}}


def test_child_process_ends_with_a_killed_manager() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_SECONDS)
        script = (
            "import asyncio\n"
            "from multiprocessing.connection import Client\n"
            "from tests.integration.manager.test_replay_process import confirm, partial, replay\n"
            # The child process waits for a challenge, which does not come.
            f"waiting = replay(partial(Client, {server.getsockname()}, authkey=b'k'))\n"
            "asyncio.run(confirm(waiting, timeout_seconds=600))"
        )
        with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3]) as parent:
            child, _ = server.accept()
            parent.kill()
        with child:
            child.settimeout(PATIENCE_SECONDS)
            assert child.recv(1) == b""


async def test_plan_whose_replay_was_killed_is_kept_and_says_so(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_TEST", str(tmp_path))
    (file := tmp_path / "deployment.yaml").write_text(FILE)
    manager = await deployment.start_manager(deployment=file)
    manager.routing.traffic.note_reports(500, time.monotonic() - 250)

    def children() -> list[int]:
        return [pid for pid, line in marked_processes(f"PRFAAS_TEST={tmp_path}").items() if "verdict" in line]

    def failure() -> str:
        for pid in children():
            kill(pid)
        return manager.world.plan.replay_failure if manager.world.plan else ""

    for name in ("i1", "d1", "d2", "d3"):
        await _node(deployment, name, manager)
    await until(lambda: failure().startswith("killed"), what="a plan without a replay")
    plan = manager.world.plan
    assert plan is not None and plan.best_requests_per_second > 1.05 * plan.requests_per_second
    assert plan.split_gain_ratio == 0 and plan.needed_instances
    assert REGISTRY.get_sample_value("prfaas_manager_failed_replays_total", {"reason": "killed"})
    await _node(deployment, "d4", manager)  # A new node makes a new plan due at once.
    await until(lambda: manager.world.plan is not None and manager.world.plan.split_gain_ratio > 0, what="a replay")
    assert manager.world.plan is not None and not manager.world.plan.replay_failure
    await _node(deployment, "d5", manager)
    await until(children, what="another replay")
    await deployment.stop_manager(manager)
    assert not children()

"""Memory of the pool counts for the process that touches its pages first: the agent, if it populates the pool."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents
from tests.support.waiting import wait_until

MIB = 1 << 20
POOL_BYTES = 256 * MIB
ROOT = Path("/sys/fs/cgroup/memory")
# It attaches after the first line, and writes to every page of its arena after the second.
ENGINE = """
import mmap, sys
from prfaas.agent.engine.client import AgentClient
from tests.support.agents import layout
input()
worker = AgentClient(sys.argv[1], instance="e0", role="worker", rank=0, layout=layout())
print("attached", flush=True)
input()
for start in range(0, len(worker.arena), mmap.PAGESIZE):
    worker.arena[start] = 1
print("written", flush=True)
input()
"""


class ControlGroup:
    """A memory control group (version 1) of the kernel."""

    def __init__(self, name: str) -> None:
        self._path = ROOT / name
        self._path.mkdir()

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    @property
    def used_bytes(self) -> int:
        return int((self._path / "memory.usage_in_bytes").read_text())

    def remove(self) -> None:
        for pid in (self._path / "cgroup.procs").read_text().split():
            (ROOT / "cgroup.procs").write_text(pid)
        self._path.rmdir()


@pytest.fixture
def control_groups() -> Iterator[list[ControlGroup]]:
    if not (os.access(ROOT, os.W_OK) and (ROOT / "memory.usage_in_bytes").exists()):
        pytest.skip("needs root and memory control groups of version 1")
    found = [ControlGroup(f"prfaas-{name}-{os.getpid()}") for name in ("agent", "engine")]
    yield found
    for group in found:
        group.remove()


@pytest.mark.parametrize("populates", [True, False])
def test_the_pool_counts_for_the_first_that_touches_it(
    processes: Agents, control_groups: list[ControlGroup], *, populates: bool
) -> None:
    of_agent, of_engine = control_groups
    settings = {"pool-bytes": str(POOL_BYTES), "populate-pool": str(populates).lower()}
    agent = processes.start("west", **settings)
    of_agent.add(agent.process.pid)
    command = [sys.executable, "-c", ENGINE, str(agent.socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        of_engine.add(engine.pid)

        def order(answer: str) -> None:
            assert engine.stdin is not None and engine.stdout is not None
            engine.stdin.write("\n")
            engine.stdin.flush()
            assert engine.stdout.readline().strip() == answer

        unpopulated_bytes = of_agent.used_bytes
        order("attached")
        if populates:
            pool_bytes = 0.99 * POOL_BYTES
            wait_until(lambda: of_agent.used_bytes - unpopulated_bytes > pool_bytes, what="the whole pool in memory")
        before = of_agent.used_bytes, of_engine.used_bytes
        order("written")
        grown = of_agent.used_bytes - before[0], of_engine.used_bytes - before[1]
        if populates:
            assert max(grown) < 0.05 * POOL_BYTES
        else:
            assert grown[0] < 0.05 * POOL_BYTES and grown[1] > 0.95 * POOL_BYTES

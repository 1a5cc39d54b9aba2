"""A deployment of an earlier version becomes one of the present version, a component at a time and under load.

The earlier version is a commit of this project's own history, taken out of it: its wire and calls are those of before.
In between, agents of both versions send to each other, and managers and routers of both talk to them.
"""

import functools
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import pytest

from tests.integration.control.redundant_deployment import RedundantDeployment, load, until_more
from tests.support.waiting import until
from tools.demo.client import get_json
from tools.processes import Child, Children
from tools.stack import Stack

PRESENT = Path(__file__).parents[3]
BEFORE_TIMINGS = "ebd796f"  # No LOSSY frames, timings, spans and learned limits.

MANAGER_FIRST = ("manager", "router 0", "w0", "e0", "router 1", "w1", "e1")  # The order of docs/deploy.md.
MANAGER_LAST = ("w0", "e0", "router 0", "w1", "e1", "router 1", "manager")


class Versions(Children):
    """Processes of the project as it lies in `tree` when they are started."""

    tree = PRESENT

    def start(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Child:
        return super().start(name, command, environment={**(environment or {}), **_code_of(self.tree)})


def _code_of(tree: Path) -> dict[str, str]:
    """Return the environment with which a process runs the code of that folder."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def _taken_out(commit: str, directory: Path) -> Path:
    """That commit's files; skips by name where the history does not reach so far."""
    found = subprocess.run(["git", "archive", commit, "prfaas", "tools"], cwd=PRESENT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"needs the history of this project as far as {commit}: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(directory, filter="data")
    asked = [sys.executable, "-c", "import prfaas, tools; print(prfaas.__file__, *tools.__path__)"]
    taken = subprocess.check_output(asked, env={**os.environ, **_code_of(directory)}, text=True)
    assert taken.split() == [f"{directory}/prfaas/__init__.py", f"{directory}/tools"]
    return directory


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Versions]:
    children = Versions(tmp_path)
    with children:
        yield children


@pytest.fixture
def relays() -> Iterator[ExitStack]:
    with ExitStack() as relays:
        yield relays


def _restart(site: RedundantDeployment, name: str) -> Callable[[], Awaitable[None]]:
    kind, _, number = name.partition(" ")
    if kind == "manager":
        return site.restart_manager
    return functools.partial(site.restart_router, int(number)) if number else functools.partial(site.restart_node, kind)


def _sent_bytes(site: RedundantDeployment, sender: str, receiver: str) -> int:
    """Return the bytes that one agent reports to have sent to another."""
    links = get_json(f"{site.agents[sender].status_url}/status")["links"]
    return sum(link["acknowledged_bytes"] for link in links if link["peer"] == receiver)


async def _until_sent(site: RedundantDeployment, *pairs: tuple[str, str]) -> None:
    for sender, receiver in pairs:
        before = _sent_bytes(site, sender, receiver)
        await until(
            lambda: _sent_bytes(site, sender, receiver) > before,  # noqa: B023 - awaited within this turn
            seconds=90,
            what=f"KV from {sender} to {receiver}",
        )


@pytest.mark.soak  # More than a minute, in which eleven processes are replaced.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", [MANAGER_FIRST, MANAGER_LAST], ids=["manager first", "manager last"])
async def test_no_request_fails_while_a_deployment_is_upgraded(
    tmp_path: Path, children: Versions, relays: ExitStack, order: Sequence[str]
) -> None:
    children.tree = _taken_out(BEFORE_TIMINGS, tmp_path / "earlier")
    stack = Stack(children, tmp_path)
    site = RedundantDeployment(children, stack, tmp_path)
    site.start(stack, relays)
    await site.is_whole()
    children.tree = PRESENT
    async with load(site) as outcomes:
        await until_more(outcomes)
        for name in order:
            await _restart(site, name)()
            await site.is_whole()
            await until_more(outcomes)
            if name == "e0":  # With w0 also upgraded, each cluster has a node of each version.
                await _until_sent(site, ("e0", "w1"), ("e1", "w0"))
        await _until_sent(site, ("e0", "w1"), ("e1", "w0"))
    assert Counter(outcome.error for outcome in outcomes if not outcome.is_whole) == {}
    assert {outcome.reason for outcome in outcomes} >= {"short", "long"}

"""The documentation's commands, run by a shell as their pages write them, in a folder that stands for the machine.

`/etc/prfaas` is a folder in it. What needs another machine, a model, root or an installer is stood in for by `STAND_INS`, and
its arguments are checked in `tests/unit/test_docs_commands.py`; services read their files, then say what they would do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_shell import Block, blocks_of, shell_blocks
from tools.reference_tables import ROOT

# Shell functions in the place of programs.
STAND_INS = """
set -e
prfaas-agent() { command prfaas-agent "$@" --check-config; }
prfaas-router() { command prfaas-router "$@" --check-config; }
prfaas-manager() { command prfaas-manager "$@" --check-config; }
pip() { :; }
curl() { :; }
vllm() { :; }
"""
# Pages whose blocks are run, all of them in their order, each page in a folder of its own.
RUN = ("README", "security")
RUN_LONG = ("solver", "twin")  # tens of seconds, and minutes
NOT_RUN = {
    "prfaas-profile": "needs an engine; tests/integration/solve runs it before one",
    "make": "is run by people; its recipes are what the other tests run",
}
# Pages whose commands are only parsed, and why.
PARSED = {
    "CONTRIBUTING": "make check is what runs this",
    "colocate": "serves until it is stopped; tests/integration/colocate starts it",
    "kubernetes": "needs a cluster; tests/integration/deploy checks what it applies",
    "dashboard": "root and a tunnel; tests/unit/tools/test_demo_wan.py",
    "deploy": "makes users, containers and a cluster; tests/integration/deploy checks what it installs",
    "manager": "an engine's command",
    "router": "measures two engines for minutes; tests/integration/ppd runs it before paced ones",
    "tracing": "pip alone",
    "transport": "two hosts; tests/integration/bench runs both on loopback",
    "vllm": "an engine's commands; tests/integration/connector has vLLM parse them",
}
RUN_SECONDS = 3000.0  # the twin's block, on a busy machine
CSV = "input_length,output_length\n" + "".join(f"{length},800\n" for length in range(1000, 90_000, 1000))
TRACE = "".join(
    f'{{"timestamp": {n * 400}, "input_length": 4000, "output_length": 200, "hash_ids": [{n}, {n + 1}]}}\n'
    for n in range(200)
)
SCENARIO = "load: 50%\nrequests: 200\n"


class Machine:
    """A folder that stands for the reader's machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._etc = directory / "etc/prfaas"
        self._etc.parent.mkdir()
        for name in ("examples", "deploy"):
            (directory / name).symlink_to(ROOT / name)
        (directory / "last-week.csv").write_text(CSV)
        (directory / "mooncake.jsonl").write_text(TRACE)
        (directory / "scenario.yaml").write_text(SCENARIO)

    def write(self, name: str, text: str) -> None:
        """A file of /etc/prfaas, as a page shows it."""
        self._etc.mkdir(exist_ok=True)
        (self._etc / name).write_text(self._here(text))

    def _here(self, text: str) -> str:
        return text.replace("/etc/prfaas", str(self._etc))

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", STAND_INS + self._here(script)],
            cwd=self._directory,
            env={**os.environ, "PATH": path, "MPLBACKEND": "Agg"},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def _blocks(page: str) -> list[Block]:
    return [block for block in shell_blocks() if block.page.stem == page]


def _is_run(block: Block) -> bool:
    return not any(line.split()[:1] == [name] for name in NOT_RUN for line in block.text.splitlines())


def test_every_page_with_commands_is_run_or_says_why_not() -> None:
    assert {block.page.stem for block in shell_blocks()} == {*RUN, *RUN_LONG, *PARSED}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [*RUN, *(pytest.param(page, marks=pytest.mark.soak) for page in RUN_LONG)])
def test_the_commands_of_a_page_run(page: str, machine: Machine) -> None:
    if page == "README":
        router, agent = (block for block in blocks_of(ROOT / "README.md") if block.language == "yaml")
        machine.write("router.yaml", router.text)
        machine.write("agent.yaml", agent.text)
        assert "east-0" in machine.run("prfaas-agent --config /etc/prfaas/agent.yaml").stdout
    for block in filter(_is_run, _blocks(page)):
        done = machine.run(block.text)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"


def test_a_command_that_fails_fails_its_page(machine: Machine) -> None:
    assert machine.run("prfaas-agent --name a --listen nonsense --secret-file /etc/prfaas/secret\ntrue").returncode == 2

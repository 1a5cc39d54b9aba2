"""The documentation's commands, run by a shell as their pages write them, in a folder that stands for the machine.

`/etc` and `/opt` are folders in it. What needs another machine, a cluster, a model, root or an installer is stood in for by
`STAND_INS`, and its arguments are checked in `tests/unit/test_docs_commands.py`; services read their files, then say what
they would do. An executor serves and is asked, and both ends of a link are here.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.console.terminal import run_here
from tests.support.docs_blocks import Block, blocks_of, shell_blocks
from tools.free_ports import free_address
from tools.helm import HelmUnavailableError, find_helm
from tools.reference_tables import ROOT

# Shell functions in the place of programs. What serves goes into the background; its block's end ends it.
STAND_INS = """
set -e
trap 'kill $(jobs -p) 2>/dev/null || :; wait || :' EXIT
prfaas-agent() { command prfaas-agent "$@" --check-config; }
prfaas-router() { command prfaas-router "$@" --check-config; }
prfaas-sidecar() { command prfaas-sidecar "$@" --check-config; }
prfaas-manager() { command prfaas-manager "$@" --check-config; }
prfaas-colocate() { command prfaas-colocate "$@" --check-config; }
iperf3() { :; }
prfaas() { case "$1" in up|down) ;; *) command prfaas "$@";; esac; }
scp() { cp -rp "$2" "${3#*:}"; }
prfaas-ppd() { cp ppd-table.json "${@: -1}"; }
pip() { :; }
curl() { case "$*" in *:8080/*) ;; *) command curl -sSf --max-time 60 "$@";; esac; }
vllm() { :; }
helm() { local words=() word; for word in "${@:2}"; do case $word in --reuse-values) ;; *) words+=("$word");; esac; done
    "$HELM" template "${words[@]}" > /dev/null; }
kubectl() { for word in "$@"; do case $word in deploy/*) test -s "$word" || return;;
    --from-file=*) test -s "${word##*=}" || return;; esac; done; }
python3() { mkdir -p "$3/bin"; printf '#!/bin/sh' > "$3/bin/pip"; chmod +x "$3/bin/pip"; }
useradd() { grep -q "^User=${@: -1}$" deploy/systemd/prfaas-agent.service; }
install() { local words=() word; for word in "$@"; do case $word in -o|prfaas) ;; *) words+=("$word");; esac; done
    command install "${words[@]}"; }
systemctl() { test -s "etc/systemd/system/${@: -1}.service"; }
podman() { test -s "$3"; }
"""
# Pages whose blocks are run, all of them in their order, each page in a folder of its own.
RUN = ("README", "colocate", "deploy", "kubernetes", "quickstarts", "router", "security", "transport")
RUN_LONG = ("solver", "twin")  # These take minutes.
# Commands that are not run, in the pages that are.
NOT_RUN = {
    "prfaas-profile": "needs an engine; tests/integration/solve runs it before one",
    "make": "is run by people; its recipes are what the other tests run",
    "python -m tools.wan": "root, and a shell; tests/integration/transport/test_long_link.py runs over such a link",
}
# Pages whose commands are only parsed, and why.
PARSED = {
    "tracing": "pip alone",
    "vllm": "an engine's commands, with a model of many GB; tests/integration/connector has vLLM parse them",
}
RUN_SECONDS = 3000.0  # The twin's block on a busy machine.
CSV = "input_length,output_length\n" + "".join(f"{length},800\n" for length in range(1000, 90_000, 1000))
TRACE = "".join(
    f'{{"timestamp": {n * 400}, "input_length": 4000, "output_length": 200, "hash_ids": [{n}, {n + 1}]}}\n'
    for n in range(200)
)
SCENARIO = "requests: 200\n"


def _helm() -> str:
    """Return the path of Helm, which renders the chart with a command's values; `true` if there is none."""
    try:
        return str(find_helm())
    except HelmUnavailableError:
        return "true"


class Machine:
    """A folder that stands for the reader's machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._etc = directory / "etc/prfaas"
        (directory / "etc/systemd/system").mkdir(parents=True)
        self._places = {"/etc/": f"{directory}/etc/", "/opt/": f"{directory}/opt/", "10.0.1.1:7420": free_address()}
        self._places |= dict.fromkeys(("127.0.0.1:8200", "localhost:8200"), free_address())
        shutil.copy(ROOT / "tests/data/ppd-table-2P2D.json", directory / "ppd-table.json")
        for name in ("examples", "deploy"):
            (directory / name).symlink_to(ROOT / name)
        (directory / "last-week.csv").write_text(CSV)
        (directory / "mooncake.jsonl").write_text(TRACE)
        (directory / "scenario.yaml").write_text(SCENARIO)
        for name in ("my-values.yaml", "my-second.yaml"):
            (directory / name).touch()

    def write(self, name: str, text: str) -> None:
        """A file of /etc/prfaas, as a page shows it."""
        self._etc.mkdir(exist_ok=True)
        (self._etc / name).touch(mode=0o600)
        (self._etc / name).write_text(self._here(text))

    def certify(self, name: str) -> None:
        """A certificate in /etc/prfaas, and its authority's under the name that the pages give it."""
        assert run_here("certs", "new", str(self._etc), name).status == 0
        shutil.copy(self._etc / "authority.pem", self._etc / "ca.pem")

    def _here(self, text: str) -> str:
        for place, here in self._places.items():
            text = re.sub(rf"(?<![\w/]){re.escape(place)}", here, text)
        return text

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", STAND_INS + self._here(script)],
            cwd=self._directory,
            env={
                **os.environ,
                "PATH": path,
                "HELM": _helm(),
                "XDG_STATE_HOME": str(self._directory),
                "MPLBACKEND": "Agg",
                "OMP_NUM_THREADS": "1",
            },
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
    return not any(line.startswith(name) for name in NOT_RUN for line in block.text.splitlines())


def test_every_page_with_commands_is_run_or_says_why_not() -> None:
    assert {block.page.stem for block in shell_blocks()} == {*RUN, *RUN_LONG, *PARSED}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [*RUN, *(pytest.param(page, marks=pytest.mark.soak) for page in RUN_LONG)])
def test_the_commands_of_a_page_run(page: str, machine: Machine) -> None:
    if page == "README":
        router, agent = (block for block in blocks_of(ROOT / "README.md") if block.language == "yaml")
        machine.write("router.yaml", router.text)
        machine.write("agent.yaml", agent.text)
    else:
        for name in ("secret", "api-keys", "operator-key"):
            machine.write(name, 32 * "s")
        machine.certify("west-7")
        (router,) = (block for block in blocks_of(ROOT / "README.md") if block.text.startswith("listen: 10.0.1.1:8080"))
        machine.write("router.yaml", router.text)
    for block in filter(_is_run, _blocks(page)):
        done = machine.run(block.text)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    if page == "README":
        assert "east-0" in machine.run("prfaas-agent --config /etc/prfaas/agent.yaml").stdout


def test_a_secret_that_is_made_of_no_file_fails_its_page(machine: Machine) -> None:
    command = "kubectl create secret generic a --from-file=key=tls/nobody.key\ntrue"
    assert machine.run(command).returncode == 1


@pytest.mark.skipif(_helm() == "true", reason="needs Helm")
def test_a_value_that_the_chart_refuses_fails_its_page(machine: Machine) -> None:
    assert machine.run("helm upgrade west deploy/helm --reuse-values --set router.replicas=none\ntrue").returncode == 1


def test_a_command_that_fails_fails_its_page(machine: Machine) -> None:
    assert machine.run("prfaas-agent --name a --listen nonsense --secret-file /etc/prfaas/secret\ntrue").returncode == 2

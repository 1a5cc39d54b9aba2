"""Every command answers --help and --version in a process that has neither torch nor vLLM."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

import prfaas
from tools.reference_tables import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A name that is None in sys.modules cannot be imported: Python raises ModuleNotFoundError for it.
WITHOUT_ENGINE = "import sys; sys.modules.update(torch=None, vllm=None); from {module} import {function}; {function}()"


def run_without_engine(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    module, function = PROJECT["scripts"][command].split(":")
    code = WITHOUT_ENGINE.format(module=module, function=function)
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_explains_itself(command: str) -> None:
    answer = run_without_engine(command, "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: {command}")


@pytest.mark.parametrize("command", ["prfaas-agent", "prfaas-manager", "prfaas-router"])
def test_a_service_says_its_version(command: str) -> None:
    assert run_without_engine(command, "--version").stdout == f"{command} {prfaas.__version__}\n"


@pytest.mark.parametrize("component", ["agent", "manager", "router"])
def test_a_service_checks_the_configuration_that_is_deployed(component: str) -> None:
    answer = run_without_engine(f"prfaas-{component}", "--config", f"deploy/{component}.yaml", "--check-config")
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("component", ["agent", "manager", "router"])
def test_a_service_refuses_an_unknown_flag(component: str) -> None:
    assert run_without_engine(f"prfaas-{component}", "--no-such-flag", "1").returncode == 2


def test_the_core_needs_neither_an_engine_nor_a_service() -> None:
    core = " ".join(PROJECT["dependencies"])
    assert [name for name in ("torch", "vllm", "grpc", "redis", "aiohttp", "transformers") if name in core] == []

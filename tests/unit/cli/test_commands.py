"""Every command answers --help and --version in a process that has neither torch nor vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prfaas
from tools.reference_tables import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A name that is None in sys.modules cannot be imported: Python raises ModuleNotFoundError for it.
WITHOUT = "import sys; sys.modules.update({absent}); from {module} import {function}; sys.exit({function}())"
ENGINE = ("torch", "vllm")


def run_without(absent: tuple[str, ...], command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    module, function = PROJECT["scripts"][command].split(":")
    code = WITHOUT.format(absent=dict.fromkeys(absent), module=module, function=function)
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_explains_itself(command: str) -> None:
    answer = run_without(ENGINE, command, "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: {command}")


@pytest.mark.parametrize(("command", "reads"), [("prfaas-sim", False), ("prfaas-router", True)])
def test_help_says_whether_a_check_reads_the_files_that_are_named(command: str, reads: bool) -> None:
    says = " ".join(run_without(ENGINE, command, "--help").stdout.split())
    assert "print the settings and exit" in says
    assert ("read the files that settings name" in says) == reads


@pytest.mark.parametrize("command", ["prfaas-agent", "prfaas-manager", "prfaas-router", "prfaas-sidecar"])
def test_a_service_says_its_version(command: str) -> None:
    assert run_without(ENGINE, command, "--version").stdout == f"{command} {prfaas.__version__}\n"


@pytest.mark.parametrize("component", ["agent", "manager", "router", "sidecar"])
def test_a_service_checks_the_configuration_that_is_deployed_and_the_files_that_it_names(
    component: str, tmp_path: Path
) -> None:
    file, secret = tmp_path / f"{component}.yaml", tmp_path / "secret"
    file.write_text(Path(f"deploy/{component}.yaml").read_text().replace("/etc/prfaas/secret", str(secret)))
    command = (f"prfaas-{component}", "--config", str(file), "--check-config")
    if component != "sidecar":
        refused = run_without(ENGINE, *command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.search(rf"{component}\.yaml line [0-9]+: secret_file: {secret} cannot be read", refused.stderr)
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    answer = run_without(ENGINE, *command)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("component", ["agent", "manager", "router", "sidecar"])
def test_a_service_refuses_an_unknown_flag(component: str) -> None:
    assert run_without(ENGINE, f"prfaas-{component}", "--no-such-flag", "1").returncode == 2


@pytest.mark.parametrize(("component", "absent"), [("manager", "grpc"), ("manager", "redis"), ("router", "aiohttp")])
def test_a_service_names_the_extra_that_is_missing(component: str, absent: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(32))
    (tmp_path / "secret").chmod(0o600)
    arguments = ["--config", f"deploy/{component}.yaml", "--secret-file", str(tmp_path / "secret")]
    answer = run_without((absent,), f"prfaas-{component}", *arguments)
    assert answer.returncode == 2
    assert f"{absent} is not installed; run: pip install 'prfaas[{component}]'" in answer.stderr


def test_the_core_needs_neither_an_engine_nor_a_service() -> None:
    core = " ".join(PROJECT["dependencies"])
    assert [name for name in ("torch", "vllm", "grpc", "redis", "aiohttp", "transformers") if name in core] == []

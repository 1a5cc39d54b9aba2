"""Reproducible sdist and wheel: equal sources and SOURCE_DATE_EPOCH give equal bytes.

python -m tools.release DIRECTORY
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "prfaas")
_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def build(directory: Path) -> list[Path]:
    """Write sdist and wheel into `directory`. Without SOURCE_DATE_EPOCH, files get the date of the last commit."""
    directory.mkdir(parents=True, exist_ok=True)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _commit_date())
    with tempfile.TemporaryDirectory() as temporary:
        copy, built = Path(temporary) / "prfaas", Path(temporary) / "built"
        for name in SOURCES:
            _copy(ROOT / name, copy / name)
        for kind in ("wheel", "sdist"):
            command = [sys.executable, "-W", "ignore", "-c", _BUILD, kind, str(built)]
            environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
            subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True)
        for archive in built.glob("*.tar.gz"):
            _repack(archive, epoch)
        return [Path(shutil.copy(file, directory)) for file in sorted(built.iterdir(), key=lambda file: file.suffix)]


def _commit_date() -> str:
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _repack(archive: Path, epoch: int) -> None:
    """Rewrite an sdist in a fixed order, with one date and no owner: setuptools writes those of this machine."""
    plain = archive.with_suffix("")
    with tarfile.open(archive) as old, tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    archive.write_bytes(gzip.compress(plain.read_bytes(), mtime=epoch))
    plain.unlink()


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n")

"""`make audit` and `make sbom` in the installed environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.audit import SOURCES
from tools.reference_tables import ROOT

SECONDS = 600.0  # Advisories may load slowly, and the machine may be busy.
MAKE = ("make", "--no-print-directory", "-o", ".venv/installed", f"BIN={Path(sys.executable).parent}")


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAKE, *words], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 60)
def test_audit_passes_or_names_each_unreachable_source() -> None:
    done = _make("audit")
    assert done.returncode == 0, done.stdout + done.stderr
    *skipped, last = done.stdout.splitlines()
    if last.startswith("skipped"):
        skipped.append(last)
        assert len(skipped) == len(SOURCES)
    else:
        assert re.fullmatch(r"\w+: no vulnerabilities known in \d+ packages", last), done.stdout
    names = [f"skipped: the advisories of {source} are unreachable" for source in SOURCES]
    assert skipped == names[: len(skipped)]


@pytest.mark.timeout(SECONDS + 60)
def test_bill_of_materials_lists_each_dependency_with_its_version() -> None:
    done = _make("sbom", "ARGS=--no-validate")  # Validation against the schema takes 15 seconds.
    assert done.returncode == 0, done.stdout + done.stderr
    bill = json.loads((ROOT / "build/sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    versions = {part["name"].lower().replace("_", "-"): part["version"] for part in bill["components"]}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in needed}  # type: ignore[index]
    assert names and {name for name in names if not versions.get(name)} == set()

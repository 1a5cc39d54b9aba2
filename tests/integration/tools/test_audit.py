"""`make audit` and `make sbom` over what is installed here."""

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

SECONDS = 600.0  # of a busy machine, and of advisories that come slowly
MAKE = ("make", "--no-print-directory", "-o", ".venv/installed", f"BIN={Path(sys.executable).parent}")


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAKE, *words], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 60)
def test_an_audit_finds_nothing_without_an_answer_or_names_each_source_that_it_could_not_reach() -> None:
    done = _make("audit")
    assert done.returncode == 0, done.stdout + done.stderr
    *skipped, last = done.stdout.splitlines()
    if last.startswith("skipped"):
        skipped.append(last)
        assert len(skipped) == len(SOURCES)
    else:
        assert re.fullmatch(r"\w+: nothing known of \d+ packages", last), done.stdout
    names = [f"skipped: the advisories of {source} cannot be reached" for source in SOURCES]
    assert skipped == names[: len(skipped)]


@pytest.mark.timeout(SECONDS + 60)
def test_the_bill_of_materials_names_what_the_package_needs_with_its_version() -> None:
    done = _make("sbom", "ARGS=--no-validate")  # against CycloneDX's schema, a quarter of a minute
    assert done.returncode == 0, done.stdout + done.stderr
    bill = json.loads((ROOT / "build/sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    versions = {its["name"].lower().replace("_", "-"): its["version"] for its in bill["components"]}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in needed}  # type: ignore[index]
    assert names and {name for name in names if not versions.get(name)} == set()

"""`make sbom` in the installed environment."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.reference_tables import ROOT

SECONDS = 600.0  # The machine may be busy.
MAKE = ("make", "--no-print-directory", "-o", ".venv/installed", f"BIN={Path(sys.executable).parent}")


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAKE, *words], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


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

"""The systemd units: systemd-analyze takes them, and what they leave open of the machine is little."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.reference_tables import ROOT

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
MAX_EXPOSURE = 2.5  # Scale of systemd-analyze security, 0 to 10.

pytestmark = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="needs systemd-analyze (apt install systemd)"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = ["systemd-analyze", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(params=UNITS, ids=lambda unit: unit.stem)
def unit(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A unit as it would stand on this machine: our commands and a user that exists."""
    source: Path = request.param
    text = source.read_text().replace("/opt/prfaas/bin", str(Path(sys.executable).parent))
    text = re.sub(r"^(User|Group)=prfaas$", r"\1=root", text, flags=re.MULTILINE)
    path = tmp_path / source.name
    path.write_text(text)
    return path


def test_there_is_a_unit_for_each_component() -> None:
    assert [unit.stem for unit in UNITS] == ["prfaas-agent", "prfaas-manager", "prfaas-router"]


def test_a_unit_is_valid(unit: Path) -> None:
    verified = analyze("verify", "--man=no", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_unit_leaves_little_of_the_machine_open(unit: Path) -> None:
    output = analyze("security", "--offline=true", str(unit)).stdout
    level = re.search(r"exposure level for \S+: ([\d.]+)", output)
    if level is None:
        pytest.skip("this systemd-analyze examines no units offline (systemd 250 does)")
    assert float(level[1]) <= MAX_EXPOSURE

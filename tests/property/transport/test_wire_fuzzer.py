"""Coverage-guided search for bytes that make a reader fail in any way but by refusing them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
REACHED = 400  # Honest inputs alone reach so many edges.


def _fuzz(corpus: Path, *, num_inputs: int, seed: int) -> int:
    """Return the number of edges that the search has reached."""
    # Not by resident memory: a process begins with the peak of the one that started it.
    limits = ["-max_len=8192", "-malloc_limit_mb=256", "-rss_limit_mb=0", "-timeout=60"]
    flags = [f"-runs={num_inputs}", f"-seed={seed}", *limits]
    flags.append(f"-artifact_prefix={corpus}/")
    command = [sys.executable, "-m", "tests.support.wire_fuzzer", str(corpus), *flags]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    reached = re.findall(r"DONE +cov: (\d+)", run.stderr)
    assert reached, run.stderr[-3000:]
    return int(reached[0])


def test_five_thousand_guided_inputs_break_no_reader(tmp_path: Path) -> None:
    assert _fuzz(tmp_path, num_inputs=5_000, seed=1) > REACHED


@pytest.mark.soak
def test_a_million_guided_inputs_break_no_reader(tmp_path: Path) -> None:
    assert _fuzz(tmp_path, num_inputs=1_000_000, seed=2) > REACHED

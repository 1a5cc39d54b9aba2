"""Emulated link whose far end falls silent on command, and the run of a deployment across it."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.soak.deployment_run import Plan
from tools.wan import Wan, WanShape, obstacle

SHAPE = WanShape(2e8, 0.03)


def run_across_link(directory: Path, plan: Plan) -> dict[str, Any]:
    """Run a plan between two namespaces, and return its results. Skip the test where there is no emulated link."""
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    with Wan(SHAPE) as wan:
        command = [sys.executable, "-m", "tests.soak.deployment_run", str(directory), json.dumps(asdict(plan))]
        child = wan.near([*command, *wan.inside("far")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        with child:
            for line in child.stdout:
                if line.strip() not in ("silence", "restore"):
                    results: dict[str, Any] = json.loads(Path(line.strip()).read_text())
                    return results
                wan.set(replace(SHAPE, loss=1.0) if line.strip() == "silence" else SHAPE)
                child.stdin.write("done\n")
                child.stdin.flush()
    raise AssertionError("the run ended early; its errors are above")

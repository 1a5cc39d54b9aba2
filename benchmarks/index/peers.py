"""Other indexes on the same prompts, each in a Python environment of its own, which is made on first use."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DYNAMO = "ai-dynamo-runtime==1.6.1"


def dynamo_radix_tree(num_blocks: int, num_nodes: int) -> dict[str, Any]:
    """Dynamo's radix tree through its Python binding: one process, look-ups of the same shape as ours."""
    try:
        python = _environment("dynamo", DYNAMO)
    except subprocess.CalledProcessError as error:
        return {"skipped": f"{DYNAMO} does not install: {error}"}
    command = [str(python), str(HERE / "dynamo_tree.py"), str(num_blocks), str(num_nodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {"package": DYNAMO, **found}


def dynamo_python() -> Path | None:
    """The interpreter that has Dynamo, where a benchmark has installed it."""
    directory = HERE / ".peers" / "dynamo"
    return directory / "bin" / "python" if (directory / "installed").exists() else None


def _environment(name: str, package: str) -> Path:
    """The interpreter of `.peers/<name>` with the package in it."""
    directory = HERE / ".peers" / name
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        venv.create(directory, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True, stdout=sys.stderr)
        (directory / "installed").touch()
    return python

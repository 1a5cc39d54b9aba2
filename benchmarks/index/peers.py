"""Other indexes on the same prompts, each in a Python environment of its own, which is made on first use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.free_ports import free_address

HERE = Path(__file__).resolve().parent
PEERS = HERE / ".peers"
DYNAMO = "ai-dynamo-runtime==1.6.1"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LMCACHE = "lmcache==0.5.6"


def dynamo_radix_tree(num_blocks: int, num_nodes: int) -> dict[str, Any]:
    """Dynamo's radix tree through its Python binding: one process, look-ups of the same shape as ours."""
    return _measured(DYNAMO, lambda: _environment("dynamo", DYNAMO), "dynamo_tree.py", num_blocks, num_nodes)


def mooncake_master(num_blocks: int) -> dict[str, Any]:
    """Mooncake's master, asked by its client for the keys of a whole prompt: one holder a key, no prefix rules."""
    ports = [int(free_address().rpartition(":")[2]) for _ in range(2)]
    return _measured(
        MOONCAKE, lambda: _environment("mooncake", "--no-deps", MOONCAKE), "mooncake_keys.py", num_blocks, *ports
    )


def lmcache_directory(num_blocks: int, num_nodes: int) -> dict[str, Any]:
    """The directory of keys that LMCache's coordinator looks prompts up in: one process, beside the torch that is here."""
    return _measured(LMCACHE, _beside_ours, "lmcache_directory.py", num_blocks, num_nodes)


def llm_d_index() -> dict[str, Any]:
    """llm-d's index, by name."""
    return {
        "skipped": "llm-d-kv-cache is a Go module and no Python package: it needs a Go toolchain and a module proxy"
    }


def _measured(package: str, prepare: Callable[[], Path], script: str, *arguments: int) -> dict[str, Any]:
    """Return the result of a script about a package, or the reason why it cannot run here."""
    try:
        python = prepare()
    except subprocess.CalledProcessError as error:
        return {"skipped": f"{package} does not install: {error}"}
    command = [str(python), str(HERE / script), *map(str, arguments)]
    beside = {**os.environ, "PYTHONPATH": str(PEERS / "lmcache")} if prepare is _beside_ours else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=beside)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"package": package, "skipped": f"{script} ended with {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"package": package, **found}


def dynamo_python() -> Path | None:
    """Return the interpreter that has Dynamo, where a benchmark has installed it."""
    directory = PEERS / "dynamo"
    return directory / "bin" / "python" if (directory / "installed").exists() else None


def _environment(name: str, *what: str) -> Path:
    """Return the interpreter of `.peers/<name>`, into which pip has installed `what`."""
    directory = PEERS / name
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        venv.create(directory, with_pip=True)
        _install(python, *what)
        (directory / "installed").touch()
    return python


def _beside_ours() -> Path:
    """This interpreter, with LMCache in a folder that is on its path for this run alone."""
    directory = PEERS / "lmcache"
    if not (directory / "installed").exists():
        _install(Path(sys.executable), "--no-deps", "--target", str(directory), LMCACHE)
        (directory / "installed").touch()
    return Path(sys.executable)


def _install(python: Path, *what: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "-q", *what], check=True, stdout=sys.stderr)

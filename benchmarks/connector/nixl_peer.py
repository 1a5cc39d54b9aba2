"""vLLM's NixlConnector over the same link, model, flags and prompts: UCX's TCP between engines at the two ends.

`pip install --no-deps nixl nixl-cu12`; it runs without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.connector.sites import CHUNK_TOKENS, FAMILY, PROMPT_TOKENS
from tools.processes import Child, Children
from tools.stack import ENGINE_ENVIRONMENT, START_SECONDS, engine_flags
from tools.tiny_models import make_model
from tools.wan import FAR, NEAR, Wan, WanShape

HTTP_PORT, SIDE_PORT = 8000, 5600
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wan0"}


def measure(wan: Wan, shapes: list[WanShape], *, warm_up: int, repeats: int) -> list[dict[str, list[float]]] | str:
    """For each link the seconds to the first token, local and pulled; or why there are none."""
    if importlib.util.find_spec("nixl") is None:
        return "skipped: not installed"
    with tempfile.TemporaryDirectory(prefix="prfaas-nixl-") as name, Children(Path(name)) as children:
        model = make_model(FAMILY, Path(name) / FAMILY)
        far, near = (_start(children, wan, end, model) for end in ("far", "near"))
        for child, end in ((far, "far"), (near, "near")):
            children.wait_until(child, lambda end=end: _answers(wan, end), seconds=START_SECONDS)  # type: ignore[misc]
        rows = []
        for number, shape in enumerate(shapes):
            wan.set(shape)
            try:
                found = _ask(wan, warm_up + repeats, first_seed=10_000 * (number + 1))
            except subprocess.CalledProcessError as error:
                return f"failed: {_reason(error.stderr, near.log, far.log)}"
            rows.append({name: values[warm_up:] for name, values in found.items()})
        return rows


def _reason(said: str, *logs: Path) -> str:
    """The last error that an engine names, or else the last line of the client."""
    lines = [line for log in logs for line in log.read_text().splitlines() if " ERROR " in line]
    return ([*said.splitlines(), *lines] or ["nothing was said"])[-1].strip()[-120:].replace("|", "/")


def _start(children: Children, wan: Wan, end: str, model: Path) -> Child:
    host = {"near": NEAR, "far": FAR}[end]
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    command = [*wan.inside(end), sys.executable, "-m", "vllm.entrypoints.openai.api_server"]  # type: ignore[arg-type]
    command += ["--model", str(model), "--served-model-name", FAMILY, "--dtype", "float32"]
    command += ["--host", host, "--port", str(HTTP_PORT), "--kv-transfer-config", json.dumps(transfer)]
    command += engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=PROMPT_TOKENS + 256)
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT)}
    return children.start(f"nixl-{end}", command, environment={**ENGINE_ENVIRONMENT, **UCX, **side})


def _url(end: str) -> str:
    return f"http://{ {'near': NEAR, 'far': FAR}[end] }:{HTTP_PORT}"


def _answers(wan: Wan, end: str) -> bool:
    probe = f"import urllib.request; urllib.request.urlopen('{_url(end)}/health', timeout=2)"
    return not subprocess.run([*wan.inside("near"), sys.executable, "-c", probe], capture_output=True).returncode


def _ask(wan: Wan, count: int, *, first_seed: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.connector.nixl_client", _url("far"), _url("near"), FAMILY]
    command += [str(PROMPT_TOKENS), str(count), str(first_seed)]
    ended = subprocess.run([*wan.inside("near"), *command], capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = json.loads(ended.stdout.splitlines()[-1])
    return found

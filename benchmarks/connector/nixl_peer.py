"""vLLM's NixlConnector over the same link, model, flags and prompts: UCX's TCP between engines at the two ends.

`pip install --no-deps nixl nixl-cu12`; it runs without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.processes import Child, Children
from tools.stack import ENGINE_ENVIRONMENT, START_SECONDS
from tools.wan import FAR, NEAR, Wan

HTTP_PORT, SIDE_PORT = 8000, 5600
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wan0"}
HOSTS = {"near": NEAR, "far": FAR}
End = Literal["near", "far"]


class NixlFailed(RuntimeError):
    """NixlConnector gave no token; the message is the last error that anything named."""


@dataclass(frozen=True)
class NixlEngines:
    """An engine at each end of the link, of which the far one prefills.

    They poll without a pause, half a core each with nothing to do: while others are measured they stand still.
    """

    wan: Wan
    near: Child
    far: Child
    family: str

    def pulled_seconds(self, num_tokens: int, *, seed: int) -> float:
        """To the first token of a prompt that is prefilled far.

        Raises:
            NixlFailed: there was none.
        """
        with self._running():
            return self._pulled_seconds(num_tokens, seed)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """But while they are asked."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for child in (self.near, self.far):
            os.killpg(child.process.pid, number)

    def _pulled_seconds(self, num_tokens: int, seed: int) -> float:
        urls = [f"http://{HOSTS[end]}:{HTTP_PORT}" for end in ("far", "near")]
        command = [sys.executable, "-m", "benchmarks.connector.nixl_client", *urls, self.family]
        ended = subprocess.run(
            [*self.wan.inside("near"), *command, str(num_tokens), str(seed)], capture_output=True, text=True
        )
        if ended.returncode:
            raise NixlFailed("failed: " + _reason(ended.stderr, self.near.log, self.far.log))
        return float(ended.stdout)


def start_nixl(children: Children, wan: Wan, model: Path, *, flags: Sequence[str]) -> NixlEngines | None:
    """Two engines with NixlConnector, once they answer; None where NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        return None
    near, far = _start(children, wan, "near", model, flags), _start(children, wan, "far", model, flags)
    for child, end in ((near, "near"), (far, "far")):
        children.wait_until(child, lambda end=end: _answers(wan, end), seconds=START_SECONDS)  # type: ignore[misc]
    return NixlEngines(wan, near, far, model.name)


def _reason(output: str, *logs: Path) -> str:
    lines = [line for log in logs for line in log.read_text().splitlines() if " ERROR " in line]
    return ([*output.splitlines(), *lines] or ["nothing was output"])[-1].strip()[-120:].replace("|", "/")


def _start(children: Children, wan: Wan, end: End, model: Path, flags: Sequence[str]) -> Child:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    command = [*wan.inside(end), sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name, "--dtype", "float32"]
    command += ["--host", HOSTS[end], "--port", str(HTTP_PORT), "--kv-transfer-config", json.dumps(transfer), *flags]
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOSTS[end], "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT)}
    return children.start(f"nixl-{end}", command, environment={**ENGINE_ENVIRONMENT, **UCX, **side})


def _answers(wan: Wan, end: End) -> bool:
    probe = f"import urllib.request; urllib.request.urlopen('http://{HOSTS[end]}:{HTTP_PORT}/health', timeout=2)"
    return not subprocess.run([*wan.inside("near"), sys.executable, "-c", probe], capture_output=True).returncode

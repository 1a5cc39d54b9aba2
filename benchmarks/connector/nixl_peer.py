"""vLLM's NixlPullConnector and NixlPushConnector over the same link, model, flags and prompts, with UCX's TCP.

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
from tools.tiny_models import VOCABULARY
from tools.wan import FAR, NEAR, Wan

Mode = Literal["pull", "push"]
HTTP_PORTS: dict[Mode, int] = {"pull": 8000, "push": 8001}
SIDE_PORTS: dict[Mode, int] = {"pull": 5600, "push": 5601}
CONNECTORS: dict[Mode, str] = {"pull": "NixlPullConnector", "push": "NixlPushConnector"}
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wan0"}
HOSTS = {"near": NEAR, "far": FAR}
End = Literal["near", "far"]


class NixlFailed(RuntimeError):
    """NIXL gave no token; the message is the last error that anything named."""


@dataclass
class NixlEngines:
    """An engine at each end of the link, of which the far one prefills.

    They poll without a pause, half a core each with nothing to do: while others are measured they stand still.
    With push, both legs leave at once from the second prompt on. Their parameters are known from the first.
    """

    mode: Mode
    wan: Wan
    near: Child
    far: Child
    family: str
    parameters: str = ""  # Of the decode leg of the latest prompt, as JSON.

    def seconds(self, num_tokens: int, *, seed: int) -> float:
        """To the first token of a prompt that is prefilled far.

        Raises:
            NixlFailed: there was none.
        """
        with self._running():
            return self._ask(num_tokens, seed)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the engines, except while they are asked."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for child in (self.near, self.far):
            os.killpg(child.process.pid, number)

    def _ask(self, num_tokens: int, seed: int) -> float:
        urls = [f"http://{HOSTS[end]}:{HTTP_PORTS[self.mode]}" for end in ("far", "near")]
        command = [sys.executable, "-m", "benchmarks.connector.nixl_client", *urls, self.family]
        known = self.parameters if self.mode == "push" else ""
        command += [str(num_tokens), str(len(VOCABULARY)), str(seed), known]
        ended = subprocess.run([*self.wan.inside("near"), *command], capture_output=True, text=True)
        if ended.returncode:
            raise NixlFailed("failed: " + _reason(ended.stderr, self.near.log, self.far.log))
        seconds, self.parameters = ended.stdout.splitlines()
        return float(seconds)


def start_nixl(children: Children, wan: Wan, model: Path, *, flags: Sequence[str]) -> dict[Mode, NixlEngines]:
    """Start two engines for each mode, and return them once they answer; none where NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        return {}
    ends: tuple[End, ...] = ("near", "far")
    engines = {(mode, end): _start(children, wan, mode, end, model, flags) for mode in CONNECTORS for end in ends}
    for (mode, end), child in engines.items():
        children.wait_until(child, lambda mode=mode, end=end: _answers(wan, mode, end), seconds=START_SECONDS)  # type: ignore[misc]
    return {
        mode: NixlEngines(mode, wan, engines[mode, "near"], engines[mode, "far"], model.name) for mode in CONNECTORS
    }


def _reason(output: str, *logs: Path) -> str:
    lines = [line for log in logs for line in log.read_text().splitlines() if " ERROR " in line]
    return ([*output.splitlines(), *lines] or ["nothing was output"])[-1].strip()[-120:].replace("|", "/")


def _start(children: Children, wan: Wan, mode: Mode, end: End, model: Path, flags: Sequence[str]) -> Child:
    transfer = {"kv_connector": CONNECTORS[mode], "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    command = [*wan.inside(end), sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name, "--dtype", "float32"]
    command += ["--host", HOSTS[end], "--port", str(HTTP_PORTS[mode])]
    command += ["--kv-transfer-config", json.dumps(transfer), *flags]
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOSTS[end], "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORTS[mode])}
    return children.start(f"nixl-{mode}-{end}", command, environment={**ENGINE_ENVIRONMENT, **UCX, **side})


def _answers(wan: Wan, mode: Mode, end: End) -> bool:
    url = f"http://{HOSTS[end]}:{HTTP_PORTS[mode]}/health"
    probe = f"import urllib.request; urllib.request.urlopen('{url}', timeout=2)"
    return not subprocess.run([*wan.inside("near"), sys.executable, "-c", probe], capture_output=True).returncode

"""Manager, agent and router that start without arguments and files, beside an engine on its default port."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prfaas import local
from tests.support.waiting import wait_until
from tools.processes import Child, Children
from tools.stack import EAGER_ENVIRONMENT, ENGINE_ENVIRONMENT, START_SECONDS, engine_flags, script
from tools.tiny_models import make_model
from tools.wan import Wan, WanShape, obstacle

CONNECTOR = {"kv_connector": "PrfaasConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}).encode()
request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


def _told(child: Child) -> list[str]:
    """Return the lines of a process that are no log events."""
    return [line for line in child.log.read_text().splitlines() if not line.startswith(("{", "I", "W", "E"))]


def _start_paced(children: Children, directory: Path) -> Child:
    command = [sys.executable, "-m", "tools.paced_engine", "--instance", "e", "--model", "tiny"]
    return children.start("engine", [*command, "--listen", "127.0.0.1:8000", "--socket", str(local.agent_socket())])


def _start_vllm(children: Children, directory: Path) -> Child:
    """Start vLLM as the agent's last line says, with no more than a small model needs."""
    model = make_model("llama", directory / "tiny")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", *engine_flags(chunk_tokens=256)]
    command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    return children.start("engine", command, environment=ENGINE_ENVIRONMENT | EAGER_ENVIRONMENT)


@pytest.mark.root
@pytest.mark.skipif(obstacle() is not None, reason=f"a network of its own {obstacle()}")
@pytest.mark.timeout(2 * START_SECONDS)
@pytest.mark.parametrize(
    "start_engine", [_start_paced, pytest.param(_start_vllm, marks=[pytest.mark.soak, pytest.mark.vllm])]
)
def test_three_commands_without_arguments_and_an_engine_answer_a_completion(
    tmp_path: Path, start_engine: Callable[[Children, Path], Child]
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with Wan(WanShape(1e9, 0.02)) as wan, Children(tmp_path, inside=wan.inside("near")) as children:
        names = ("agent", "router", "manager")  # In any order.
        started = [children.start(name, [script(f"prfaas-{name}")], environment=state) for name in names]
        wait_until(local.agent_socket().exists, what="the agent's socket")
        engine = start_engine(children, tmp_path)
        answers: list[Any] = []

        def is_answered() -> bool:
            command = [*wan.inside("near"), sys.executable, "-c", ASK, "http://127.0.0.1:8080/v1/completions"]
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            answers.extend([json.loads(asked.stdout)] if asked.returncode == 0 else [])
            return bool(answers)

        children.wait_until(engine, is_answered, seconds=START_SECONDS)
        assert len(answers[0]["choices"][0]["token_ids"]) == 4
        assert [len(_told(child)) for child in started] == [3, 3, 3]
    secret = tmp_path / "state" / "prfaas" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_commands_that_start_at_once_agree_on_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(lambda _: local.secret_file().read_bytes(), range(64)))
    assert len(found) == 1
    assert [path.name for path in (tmp_path / "prfaas").iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("component", "flag"),
    [
        ("manager", "--listen=10.0.0.1:7410"),
        ("agent", "--listen=10.0.0.1:7400"),
        ("agent", "--managers=10.0.0.1:7410"),
        ("router", "--managers=10.0.0.1:7410"),
    ],
)
def test_an_address_beyond_loopback_needs_a_named_secret(component: str, flag: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [script(f"prfaas-{component}"), flag, "--insecure-plaintext"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 2
    assert "secret_file: missing" in ran.stderr

"""What stops an engine's start, with a message that names it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.processes import Child, Children
from tools.stack import ENGINE_ENVIRONMENT, START_SECONDS, AgentProcess, Stack
from tools.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FAMILY = "llama"
# One process without an HTTP server: quicker to its end than the API server, with the same start of the engine.
STARTED = "the engine has started"
PROGRAM = f"""
import json, sys, threading
from vllm import LLM
engine = LLM(**json.loads(sys.argv[1]))
print("{STARTED}", flush=True)
threading.Event().wait()
"""


class Bench:
    """Starts engines that attach, or fail to."""

    def __init__(self, children: Children, model: Path) -> None:
        self.children = children
        self._model = model
        self._number = 0

    def start(self, extra_config: dict[str, Any], **settings: Any) -> Child:
        self._number += 1
        transfer = {"kv_connector": "PrfaasConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra_config}
        arguments = {
            "model": str(self._model),
            "served_model_name": FAMILY,
            "enforce_eager": True,
            "max_model_len": 512,
            "kv_cache_memory_bytes": 32 << 20,
            "kv_transfer_config": transfer,
            **settings,
        }
        command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
        return self.children.start(f"engine-{self._number}", command, environment=ENGINE_ENVIRONMENT)


@contextmanager
def bench(directory: Path) -> Iterator[tuple[Bench, AgentProcess]]:
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        agent = stack.start_agent("node")
        stack.await_agent(agent)
        yield Bench(children, model), agent


def end_of(child: Child) -> str:
    """All that an engine wrote, once it has ended with an error."""
    assert child.process.wait(START_SECONDS) not in (0, None)
    return child.log.read_text()


def assert_says(child: Child, words: Sequence[str]) -> None:
    text = end_of(child)
    assert [word for word in words if word not in text] == [], text[-3000:]


def test_a_wrong_key_and_an_agent_that_is_not_there_are_named(tmp_path: Path) -> None:
    with bench(tmp_path) as (engines, agent):
        wrong_key = engines.start({"agent_socket": str(agent.socket), "agnet": "x"})
        nobody = engines.start({"agent_socket": str(tmp_path / "nobody.sock")})
        assert_says(wrong_key, ["ConfigError", "kv_connector_extra_config", "agnet", "agent_socket"])
        assert_says(nobody, ["AgentUnreachable", "nobody.sock", "start prfaas-agent first"])


@pytest.mark.soak  # three engines start for it; tests/integration/agent has it without engines
def test_an_unequal_layout_is_refused_by_what_differs(tmp_path: Path) -> None:
    with bench(tmp_path) as (engines, agent):
        config = {"agent_socket": str(agent.socket)}
        first = engines.start(config, dtype="float32")
        engines.children.wait_until(first, lambda: STARTED in first.log.read_text(), seconds=START_SECONDS)
        other_dtype = engines.start(config, dtype="bfloat16")
        other_blocks = engines.start(config, dtype="float32", block_size=64)
        assert_says(other_dtype, ["LayoutError", "runs this model too", "dtype", "float32", "bfloat16"])
        assert_says(other_blocks, ["LayoutError", "block_tokens: 128 here, 64 there"])
        assert first.is_alive()

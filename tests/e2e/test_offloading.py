"""Real engines with OffloadingConnector behind PrfaasConnector, and the node's pool as a tier below the former."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.engine_deployment import random_prompt
from tools.processes import Children
from tools.stack import EAGER_ENVIRONMENT, ENGINE_ENVIRONMENT, AgentProcess, Stack
from tools.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
BLOCK_TOKENS = 128  # vLLM's default on a CPU.
LENGTHS = (3 * BLOCK_TOKENS, 700)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
NUM_BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    directory = tmp_path_factory.mktemp("offloading")
    with Children(directory) as children:
        stack = Stack(children, directory)
        agent = stack.start_agent("west")
        stack.await_agent(agent)
        yield agent


def _answers(model: Path, agent: AgentProcess, prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Return tokens and cached tokens of each prompt, from an engine that starts and ends here."""
    command = [sys.executable, "-m", "tests.support.offloading_engine", str(model), str(agent.socket)]
    environment = os.environ | ENGINE_ENVIRONMENT | EAGER_ENVIRONMENT
    environment |= {"PYTHONPATH": str(REPOSITORY), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ended = subprocess.run(
        [*command, agent.status_url, str(NUM_BLOCKS)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    written = next(line for line in ended.stdout.splitlines() if line.startswith("[["))  # Beside vLLM's log.
    return [(tokens, cached) for tokens, cached in json.loads(written)]


def test_a_restarted_engine_loads_what_the_one_before_left(agent: AgentProcess, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "llama")
    first = _answers(model, agent, PROMPTS)
    again = _answers(model, agent, PROMPTS)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]
    assert [cached for _, cached in first] == [0, 0]
    assert all(
        cached >= (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for (_, cached), length in zip(again, LENGTHS, strict=True)
    )

"""Real engines with OffloadingConnector behind PrfaasConnector, and the node's pool as a tier below the former."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS, PATIENT, random_prompt
from tests.support.engine_pair import flags
from tests.support.waiting import wait_until
from tools.demo.client import complete, get_json, prefilled_tokens
from tools.processes import Children
from tools.stack import EngineProcess, Stack
from tools.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
MULTI = ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
REPOSITORY = Path(__file__).parents[2]
# Full attention alone, and with sliding windows.
FAMILIES = ("llama", pytest.param("gemma3", marks=pytest.mark.soak))
LENGTHS = (3 * CHUNK_TOKENS, 700)
BLOCK_TOKENS = 128  # vLLM's default on a CPU.


class Engines:
    """One node, and engines of one model on it, one after the other."""

    def __init__(self, children: Children, directory: Path, family: str) -> None:
        self.children, self._family = children, family
        self._stack = stack = Stack(children, directory)
        self._model = make_model(family, directory / family)
        self.agent = stack.start_agent("west")
        stack.await_agent(self.agent)

    def start(self, name: str) -> EngineProcess:
        socket = {"agent_socket": str(self.agent.socket)}
        tier = {"type": "PrfaasTier", "module_path": "prfaas.connector.vllm.tier", "silence_seconds": "20s"} | socket
        spec = {"spec_name": "HostOffloadingSpec", "spec_module_path": "tests.support.host_offloading"}
        offloading = spec | {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
        connectors = [
            {"kv_connector": "PrfaasConnector", "kv_connector_extra_config": socket | {"reuse": False} | PATIENT},
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": offloading},
        ]
        engine = self._stack.start_engine(
            name,
            self._model,
            agent=self.agent,
            role="kv_both",
            extra=(*flags(self._family), "--enable-prefix-caching"),
            connector={"connectors": [connector | {"kv_role": "kv_both"} for connector in connectors]},
            connector_class=MULTI,
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
        self._stack.await_server(engine.child, engine.url)
        return engine

    def ask(self, engine: EngineProcess, prompt: list[int], **fields: str) -> tuple[tuple[int, ...], int]:
        """Return greedy tokens, and how many tokens the engine computed for the prompt."""
        before = prefilled_tokens(engine.url)
        body = {"model": self._family, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        tokens = complete(engine.url, body | fields).token_ids
        return tokens, prefilled_tokens(engine.url) - before

    def num_stored(self) -> int:
        stored: int = get_json(f"{self.agent.status_url}/status")["pool"]["prefix"]
        return stored


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family, directory = request.param, tmp_path_factory.mktemp("offloading")
    with Children(directory) as children:
        yield Engines(children, directory, family)


def test_a_restarted_engine_loads_what_the_one_before_left_in_the_pool(engines: Engines) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    first = engines.start("first")
    answers = [engines.ask(first, prompt)[0] for prompt in prompts]
    num_blocks = sum(length // BLOCK_TOKENS for length in LENGTHS)
    wait_until(lambda: engines.num_stored() >= num_blocks, what="the chunks in the pool")
    engines.children.stop_child(first.child)
    second = engines.start("second")
    for prompt, answer in zip(prompts, answers, strict=True):
        alone, computed = engines.ask(second, prompt, cache_salt=os.urandom(8).hex())
        assert (alone, computed) == (answer, len(prompt))
        loaded, computed = engines.ask(second, [*prompt, 7])
        assert computed < len(prompt) // 2
        assert engines.ask(second, [*prompt, 7], cache_salt=os.urandom(8).hex())[0] == loaded

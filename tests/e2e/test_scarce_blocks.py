"""Real engines with few blocks and KV in fp8: requests wait, share prefixes, and are preempted, and the counters agree."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.agent_nodes import prompt_of
from tests.support.engine_deployment import random_prompt
from tests.support.engine_pair import EnginePair, counts, num_outcomes, parameters, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import REQUEST_SECONDS, get_text

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]
FAMILY = "llama"
BLOCK_TOKENS = 32
NUM_BLOCKS = 24  # vLLM keeps one.
LENGTH = 301  # Ten blocks of such a prompt travel.
LOADED, PREEMPTED = "loaded blocks", "preempted"  # Beside outcomes of transfers and reasons of ends.
MIN_DISTINCT = 6  # With fewer distinct tokens out of 24, different computations might agree by chance.
FLAGS: dict[str, Any] = {
    "kv-cache-dtype": "fp8",
    "block-size": BLOCK_TOKENS,
    "num-gpu-blocks-override": NUM_BLOCKS,
    "max-model-len": (NUM_BLOCKS - 2) * BLOCK_TOKENS,
    "scheduling-policy": "priority",
}


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    extra = tuple(word for name, value in FLAGS.items() for word in (f"--{name}", str(value)))
    directory = tmp_path_factory.mktemp("small")
    with running_pair(
        FAMILY, directory, extra=(*extra, "--enable-prefix-caching"), connector={"reuse": False}
    ) as running:
        yield running


class Clients:
    """Concurrent clients of both engines. Their results are reasons why answers ended."""

    def __init__(self, pair: EnginePair) -> None:
        self.pair = pair
        self._threads = ThreadPoolExecutor(16)
        self._ends: list[Any] = []

    def prefill(self, prompt: Sequence[int], grant: str) -> None:
        self._ask(self.pair.prefill.url, prompt[:-1], max_tokens=1, **_granted("do_remote_decode", grant))

    def decode(self, prompt: Sequence[int], grant: str = "", **fields: Any) -> None:
        self._ask(self.pair.decode.url, prompt, **{"max_tokens": 3, **_granted("do_remote_prefill", grant), **fields})

    def transfer(self, prompt: Sequence[int], **fields: Any) -> None:
        grant = self.pair.grant(prompt)
        self.decode(prompt, grant, **fields)
        self.prefill(prompt, grant)

    def _ask(self, url: str, prompt: Sequence[int], **fields: Any) -> None:
        body = {"model": self.pair.family, "ignore_eos": True, "temperature": 0, "prompt": list(prompt)}
        self._ends.append(self._threads.submit(_finish_reasons, url, {**body, "stream": True, **fields}))

    def wait(self) -> Counter[str]:
        """Wait for all answers and count the reasons of their ends."""
        return Counter(itertools.chain.from_iterable(ends.result() for ends in self._ends))


def _granted(direction: str, grant: str) -> dict[str, Any]:
    return {"kv_transfer_params": parameters(direction, grant)} if grant else {}


def _finish_reasons(url: str, body: dict[str, Any]) -> list[str]:
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=REQUEST_SECONDS)
    with contextlib.closing(client):
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        lines = [line[6:] for line in client.getresponse() if line.startswith(b"data: {")]
    choices = itertools.chain.from_iterable(json.loads(line)["choices"] for line in lines)
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def _two_answers_to_one_prompt(clients: Clients) -> None:
    clients.transfer(prompt_of(2, LENGTH), n=2, temperature=1.0)


def _engine_holds_six_blocks(clients: Clients) -> None:
    clients.decode(prompt_of(4, 6 * BLOCK_TOKENS + 8))
    clients.wait()
    clients.transfer(prompt_of(4, LENGTH))


def _fewer_blocks_than_requests_want(clients: Clients, *, first_seed: int = 5, urgency: int = 0) -> None:
    """Two requests of ten blocks fit at first, but not after they have grown."""
    prompts = [prompt_of(seed, LENGTH) for seed in range(first_seed, first_seed + 5)]
    grants = [clients.pair.grant(prompt) for prompt in prompts]
    num_arrived = len(clients.pair.inbound_transfers("west"))
    for prompt, grant in zip(prompts, grants, strict=True):
        clients.prefill(prompt, grant)
    wait_until(lambda: len(clients.pair.inbound_transfers("west")) == num_arrived + len(prompts), what="all KV")
    for number, (prompt, grant) in enumerate(zip(prompts, grants, strict=True)):
        clients.decode(prompt, grant, max_tokens=120, priority=-number * urgency)


def _last_request_is_most_urgent(clients: Clients) -> None:
    _fewer_blocks_than_requests_want(clients, first_seed=10, urgency=1)


SCARCE = {"send completed": 5, "receive completed": 5, LOADED: 50, "length": 10, PREEMPTED: 1}
SCENARIOS: list[tuple[Callable[[Clients], None], dict[str, int]]] = [
    # How much the first answer loads before the second has computed it is chance.
    (_two_answers_to_one_prompt, {"send completed": 1, "receive completed": 1, "receive in_use": 1, "length": 3}),
    (_engine_holds_six_blocks, {"send completed": 1, "receive completed": 1, LOADED: 4, "length": 3}),
    (_fewer_blocks_than_requests_want, SCARCE),
    (_last_request_is_most_urgent, SCARCE),
]


def _counters(pair: EnginePair) -> Counter[str]:
    total: Counter[str] = Counter()
    prefill, decode = counts(pair.prefill), counts(pair.decode)
    for name, count in (*prefill.items(), *decode.items()):
        if found := re.fullmatch(r'prfaas_connector_transfers_total{direction="(.+)",outcome="(.+)"}', name):
            total[" ".join(found.groups())] += int(count)
    loaded_bytes = int(decode.get('prfaas_connector_copied_bytes_total{direction="receive"}', 0))
    total[LOADED] = loaded_bytes // pair.layout().groups[0].block_bytes
    page = get_text(f"{pair.decode.url}/metrics")
    total[PREEMPTED] = sum(int(float(count)) for count in re.findall(r"vllm:num_preemptions_total{.*} (.+)", page))
    return total


@pytest.mark.parametrize(("scenario", "expected"), SCENARIOS, ids=[scenario.__name__ for scenario, _ in SCENARIOS])
def test_counters_show_what_happened(
    small_pair: EnginePair, scenario: Callable[[Clients], None], expected: dict[str, int]
) -> None:
    before, clients = _counters(small_pair), Clients(small_pair)
    scenario(clients)
    ends = clients.wait()

    def counted() -> dict[str, int]:
        difference = dict(ends + (_counters(small_pair) - before))
        if PREEMPTED in difference:
            difference[PREEMPTED] = 1  # The number is chance.
        return {word: count for word, count in difference.items() if word != LOADED or LOADED in expected}

    with contextlib.suppress(AssertionError):  # The comparison below shows the difference.
        wait_until(lambda: counted() == expected, what="the counters")
    assert counted() == expected
    wait_until(small_pair.nothing_is_left, what="idle agents")


@pytest.mark.parametrize("length", [257, 513, 600])
def test_kv_in_fp8_gives_the_tokens_of_one_engine(small_pair: EnginePair, length: int) -> None:
    assert "kv_cache_dtype=fp8" in small_pair.layout().packing
    prompt = random_prompt(length, seed=length)
    before = num_outcomes(small_pair.decode, "receive", "completed")
    expected = small_pair.alone(prompt)
    assert small_pair.through_both(prompt) == expected and len(set(expected)) >= MIN_DISTINCT
    assert num_outcomes(small_pair.decode, "receive", "completed") == before + 1

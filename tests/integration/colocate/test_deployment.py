"""A colocated instance as the decode node of a deployment: it receives prompts from afar, and computes others itself."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.engine_deployment import EngineOptions, random_prompt
from tests.support.engine_pair import ACROSS_CLUSTERS, EnginePair, flags, num_outcomes
from tests.support.waiting import wait_until
from tools.demo.client import get_text
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Children

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]
FAMILY = "gemma3"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    directory = tmp_path_factory.mktemp("deployment")
    with Children(directory) as children, Relay(free_address()) as reports:
        pair = EnginePair(children, directory, FAMILY, reports)
        pair.configure(ACROSS_CLUSTERS)
        pair.start_engines(
            {"east": EngineOptions(flags(FAMILY)), "west": EngineOptions(flags(FAMILY), is_colocated=True)}
        )
        yield pair


def _expected(pair: EnginePair, prompt: list[int], **fields: Any) -> tuple[int, ...]:
    return pair.at(pair.prefill, prompt, cache_salt=os.urandom(8).hex(), **fields)


def _is_running(pair: EnginePair) -> bool:
    lines = [line for line in get_text(f"{pair.decode.url}/metrics").splitlines() if "num_requests_running{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines) > 0


def test_a_prompt_that_another_cluster_prefills_goes_on_at_a_colocated_instance(pair: EnginePair) -> None:
    for length in (100, 700, 2049):
        prompt = random_prompt(length, seed=length)
        before = num_outcomes(pair.decode, "receive", "completed")
        assert pair.through_both(prompt) == _expected(pair, prompt)
        assert num_outcomes(pair.decode, "receive", "completed") == before + 1


def test_local_prompts_are_computed_beside_running_and_remote_requests(pair: EnginePair) -> None:
    long, local, remote = (random_prompt(length, seed=length + 1) for length in (64, 1500, 900))
    expected = _expected(pair, long, max_tokens=1500), _expected(pair, local), _expected(pair, remote)
    with ThreadPoolExecutor(3) as threads:
        decoding = threads.submit(pair.at, pair.decode, long, max_tokens=1500)
        wait_until(lambda: _is_running(pair), what="a running request")
        answers = threads.submit(pair.locally, local), threads.submit(pair.through_both, remote)
        assert [answer.result() for answer in answers] == [expected[1], expected[2]]
        assert not decoding.done()
        assert decoding.result() == expected[0]


def _cluster(name: str, kind: str, role: str, url: str, wire: str) -> dict[str, Any]:
    instance = {"name": f"{name}/0", "url": url, "role": role, "agent": name, "wire": wire}
    return {"name": name, "kind": kind, "instances": [instance]}


def test_a_router_has_long_prompts_prefilled_afar_and_short_ones_at_the_colocated_instance(pair: EnginePair) -> None:
    clusters = [
        _cluster("east", "prfaas", "prefill", pair.prefill.url, pair.east.wire),
        _cluster("west", "pd", "both", pair.decode.url, pair.west.wire),
    ]
    child, url = pair.stack.start_router({"clusters": clusters, "threshold_tokens": 800, "silence_seconds": "60s"})
    pair.stack.await_server(child, url)
    before = num_outcomes(pair.decode, "receive", "completed")
    for length, transfers in ((1200, 1), (400, 0)):
        prompt = random_prompt(length, seed=length + 2)
        assert pair.ask(url, prompt).token_ids == _expected(pair, prompt, max_tokens=12)
        before += transfers
        assert num_outcomes(pair.decode, "receive", "completed") == before

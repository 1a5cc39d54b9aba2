"""Answers stay right while manager, Redis and agents are killed, and the deployment heals afterwards."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_deployment import random_prompt
from tests.support.engine_pair import ACROSS_CLUSTERS, EnginePair, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import get_text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FAMILY = "granite4h"
PROMPT_TOKENS = 513
HEAL_SECONDS = 120.0
NUM_OTHERS = 12  # Prompts whose blocks fill a pool of 8 MiB.


@pytest.fixture(scope="module")
def deployment(pair: EnginePair) -> EnginePair:
    manager = {"threshold_tokens": 256, "expiry_seconds": "5s"}
    pair.configure(ACROSS_CLUSTERS, manager=manager, silence_seconds="3s")
    return pair


def _run(deployment: EnginePair, *, num_requests: int, num_kills: int, seed: int) -> None:
    source = random.Random(seed)
    kills: list[Callable[[], None]] = [
        deployment.kill_manager,
        deployment.kill_redis,
        lambda: deployment.kill_agent("east"),
        lambda: deployment.kill_agent("west"),
    ]
    prompts = [random_prompt(PROMPT_TOKENS, seed=seed * 1000 + number) for number in range(num_requests)]
    expected = [deployment.reference(prompt) for prompt in prompts]
    moments = sorted(source.sample(range(num_requests), num_kills))
    for number, prompt in enumerate(prompts):
        if number in moments:
            kills[moments.index(number) % len(kills)]()
        assert deployment.ask(deployment.router_url, prompt).token_ids == expected[number], f"request {number}"
    wait_until(deployment.has_healed, seconds=HEAL_SECONDS, what="a healed deployment")
    _assert_transfers_again(deployment, seed)


def _assert_transfers_again(deployment: EnginePair, seed: int) -> None:
    deadline = time.monotonic() + HEAL_SECONDS
    for number in range(100):
        assert time.monotonic() < deadline, "no transfer has completed since the last kill"
        answer = deployment.ask(deployment.router_url, random_prompt(PROMPT_TOKENS, seed=seed * 1000 + 500 + number))
        records = {record["transfer_id"]: record for record in deployment.inbound_transfers("west")}
        if records.get(answer.headers.get("x-prfaas-transfer"), {}).get("outcome") == "completed":
            return


@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
def test_answers_stay_right_while_each_process_is_killed_once(deployment: EnginePair) -> None:
    _run(deployment, num_requests=12, num_kills=4, seed=1)
    loads = {"east/0", "west/0"}
    wait_until(lambda: deployment.loads() == loads, seconds=HEAL_SECONDS, what="the engines' loads")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pair", [FAMILY], indirect=True)
@pytest.mark.parametrize("seed", [2, 13, 14])
def test_answers_stay_right_over_a_hundred_requests_with_random_kills(deployment: EnginePair, seed: int) -> None:
    _run(deployment, num_requests=100, num_kills=20, seed=seed)


@pytest.mark.soak
def test_blocks_evicted_between_decision_and_use_cost_a_counted_recompute(tmp_path: Path) -> None:
    manager = {"threshold_tokens": 256, "expiry_seconds": "300s"}
    with running_pair(FAMILY, tmp_path, nodes=ACROSS_CLUSTERS, manager=manager, pool_bytes="8MiB") as deployment:
        known = random_prompt(513, seed=1)
        deployment.ask(deployment.router_url, known)
        wait_until(deployment.has_healed, what="an index that knows the blocks")
        deployment.reports.cut_after(0)  # The manager does not hear of evictions from here on.
        for engine in deployment.engines.values():
            for number in range(NUM_OTHERS):
                deployment.ask(engine.url, random_prompt(513, seed=100 + number))
        local, remote = known + random_prompt(100, seed=2), known + random_prompt(400, seed=3)
        for prompt, route in ((local, "local"), (remote, "remote")):
            answer = deployment.ask(deployment.router_url, prompt)
            assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-cached-tokens"]) == (route, "512")
            assert answer.token_ids == deployment.reference(prompt)
        deployment.reports.restore()
        wait_until(lambda: _num_promises(deployment, "broken") == 2, what="the report of broken promises")
        assert _num_promises(deployment, "kept") == 0
        wait_until(deployment.has_healed, what="an index that knows the present blocks")


def _num_promises(deployment: EnginePair, outcome: str) -> float:
    lines = get_text(f"{deployment.manager_url}/metrics").splitlines()
    named = [line for line in lines if line.startswith("prfaas_manager_promises_total{") and f'"{outcome}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in named)

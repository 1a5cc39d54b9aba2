"""Requests go on, right, while manager, Redis and agents are killed at random; afterwards everything has healed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.managed import Deployment, prompt_of, running_deployment
from tests.support.waiting import wait_until
from tools.demo.client import get_json

pytestmark = [pytest.mark.vllm]
PROMPT_TOKENS = 513
HEAL_SECONDS = 120.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("kills")) as running:
        yield running


def _run(deployment: Deployment, *, num_requests: int, num_kills: int, seed: int) -> None:
    source = random.Random(seed)
    kills: list[Callable[[], None]] = [
        deployment.kill_manager,
        deployment.kill_redis,
        lambda: deployment.kill_agent("east"),
        lambda: deployment.kill_agent("west"),
    ]
    prompts = [prompt_of(PROMPT_TOKENS, seed=seed * 1000 + n) for n in range(num_requests)]
    wanted = [deployment.reference(prompt) for prompt in prompts]
    moments = sorted(source.sample(range(num_requests), num_kills))
    for number, prompt in enumerate(prompts):
        if number in moments:
            kills[moments.index(number) % len(kills)]()
        assert deployment.ask(deployment.router_url, prompt).token_ids == wanted[number], f"request {number}"
    wait_until(deployment.has_healed, seconds=HEAL_SECONDS, what="a healed deployment")
    _assert_transfers_again(deployment, seed)


def _assert_transfers_again(deployment: Deployment, seed: int) -> None:
    """A long prompt goes through the whole path once more, within the time that healing may take."""
    deadline = time.monotonic() + HEAL_SECONDS
    for number in range(100):
        assert time.monotonic() < deadline, "no transfer has completed since the last kill"
        answer = deployment.ask(deployment.router_url, prompt_of(PROMPT_TOKENS, seed=seed * 1000 + 500 + number))
        transfer = answer.headers.get("x-prfaas-transfer")
        records = {its["transfer_id"]: its for its in get_json(f"{deployment.agents['west'].status_url}/transfers")}
        if transfer in records and records[transfer]["outcome"] == "completed":
            return


@pytest.mark.timeout(900)
def test_answers_stay_right_while_each_process_is_killed_once(deployment: Deployment) -> None:
    _run(deployment, num_requests=12, num_kills=4, seed=1)


def test_the_manager_knows_how_busy_the_engines_are(deployment: Deployment) -> None:
    wait_until(lambda: deployment.loads() == {"east/0", "west/0"}, seconds=HEAL_SECONDS, what="the engines' loads")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 13, 14])
def test_answers_stay_right_over_a_hundred_requests_with_kills_at_random(deployment: Deployment, seed: int) -> None:
    _run(deployment, num_requests=100, num_kills=20, seed=seed)

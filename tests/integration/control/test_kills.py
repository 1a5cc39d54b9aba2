"""Each process is killed under load: no request hangs, and every answer is correct or ends with an error."""

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.process_deployment import Outcome, ProcessDeployment, ask, client, fresh_prompt, running_deployment
from tests.support.waiting import until, wait_until

T = 256
NUM_CLIENTS = 6
HEAL_SECONDS = 120.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ProcessDeployment]:
    with running_deployment(
        tmp_path, threshold_tokens=T, expiry_seconds="30s"
    ) as made:  # The default expiry: agents start slowly.
        yield made


def _kills(site: ProcessDeployment) -> dict[str, Callable[[], None]]:
    return {
        **{engine: partial(site.kill_engine, engine) for engine in site.engines},
        **{f"agent {agent}": partial(site.kill_agent, agent) for agent in site.agents},
        "manager": site.kill_manager,
        "redis": site.kill_redis,
    }


async def _run(site: ProcessDeployment, kills: list[str], *, requests_between: int, seed: int) -> list[Outcome]:
    """Keep `NUM_CLIENTS` requests under way; after so many answers each, and once the last one is back, a process is killed."""
    source = random.Random(seed)
    outcomes: list[Outcome] = []
    is_over = asyncio.Event()

    async def keep_asking() -> None:
        async with client() as session:
            while not is_over.is_set():
                length = source.choice((T // 2, 2 * T, 3 * T))
                outcomes.append(await ask(session, site.router_url, fresh_prompt(length)))

    clients = [asyncio.create_task(keep_asking()) for _ in range(NUM_CLIENTS)]
    try:
        for kill in kills:
            await _more(outcomes, requests_between)
            await until(lambda: _is_well(site), seconds=HEAL_SECONDS, what="healthy engines")
            await asyncio.to_thread(_kills(site)[kill])
        await _more(outcomes, requests_between)
    finally:
        is_over.set()
        await asyncio.gather(*clients)
    return outcomes


async def _more(outcomes: list[Outcome], num_requests: int) -> None:
    wanted = len(outcomes) + num_requests
    await until(lambda: len(outcomes) >= wanted, seconds=HEAL_SECONDS, what=f"{num_requests} more answers")


def _check(site: ProcessDeployment, outcomes: list[Outcome], kills: list[str]) -> None:
    assert not [
        (outcome.token_ids, outcome.wanted, outcome.error, outcome.headers)
        for outcome in outcomes
        if not outcome.is_honest
    ]
    failed = [outcome for outcome in outcomes if not outcome.is_whole]
    num_decode_kills = sum(name.startswith("west/") for name in kills)
    assert len(failed) <= num_decode_kills * NUM_CLIENTS, [outcome.error for outcome in failed]
    assert all(outcome.token_ids for outcome in failed), "requests without a token yet are retried"
    wait_until(lambda: _is_well(site), seconds=HEAL_SECONDS, what="healthy engines")


def _is_well(site: ProcessDeployment) -> bool:
    return site.health() == dict.fromkeys(site.engines, True)


async def _transfers_again(site: ProcessDeployment) -> None:
    """A long prompt goes through the whole path once more."""
    received = sum(site.transfers(engine)["right"] for engine in site.engines if engine.startswith("west/"))
    async with asyncio.timeout(HEAL_SECONDS), client() as session:
        while sum(site.transfers(engine)["right"] for engine in site.engines if engine.startswith("west/")) <= received:
            assert (await ask(session, site.router_url, fresh_prompt(3 * T))).is_whole


@pytest.mark.timeout(600)
async def test_answers_are_correct_or_fail_while_each_process_is_killed(site: ProcessDeployment) -> None:
    kills = ["east/0", "west/0", "agent east", "redis", "manager", "west/1", "agent west", "east/1"]
    outcomes = await _run(site, kills, requests_between=12, seed=1)
    _check(site, outcomes, kills)
    assert {outcome.reason for outcome in outcomes} >= {"short", "long"}
    await _transfers_again(site)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_98_percent_are_served_while_fifty_processes_are_killed(site: ProcessDeployment, seed: int) -> None:
    source = random.Random(seed)
    kills = [source.choice(sorted(_kills(site))) for _ in range(50)]
    outcomes = await _run(site, kills, requests_between=100, seed=seed)
    _check(site, outcomes, kills)
    served = sum(outcome.is_whole for outcome in outcomes)
    assert served >= 0.98 * len(outcomes), f"{served} of {len(outcomes)}"
    await _transfers_again(site)

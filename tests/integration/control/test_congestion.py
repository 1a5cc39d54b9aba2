"""A link is cut to a tenth under load: the threshold rises and recovers, and no request fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.process_deployment import Outcome, ProcessDeployment, ask, client, fresh_prompt, running_deployment
from tests.support.waiting import until
from tools.demo.client import get_text
from tools.link import LinkShape

T = 500
LONG_TOKENS = 2 * T  # About 2 MB of KV.
ARRIVAL_SECONDS = 0.25  # 8 MB/s: a third of the link, three times a tenth of it
WIDE, NARROW = LinkShape(bytes_per_second=24e6), LinkShape(bytes_per_second=2.4e6)
STATE_SECONDS = 180.0  # More than enough for any state to come.
MAX_CHANGES = 20  # Changes of the threshold: five steps up, five down, and five failed tests of the link.


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ProcessDeployment]:
    with running_deployment(tmp_path, num_engines=1, shape=WIDE, threshold_tokens=T) as made:
        yield made


@asynccontextmanager
async def _load(site: ProcessDeployment) -> AsyncIterator[list[Outcome]]:
    """A long prompt each `ARRIVAL_SECONDS`, whatever became of those before; all have ended when the block has."""
    outcomes: list[Outcome] = []
    asking: list[asyncio.Task[None]] = []

    async def ask_once() -> None:
        async with client() as session:
            outcomes.append(await ask(session, site.router_url, fresh_prompt(LONG_TOKENS)))

    async def arrive() -> None:
        while True:
            asking.append(asyncio.create_task(ask_once()))
            await asyncio.sleep(ARRIVAL_SECONDS)

    arrivals = asyncio.create_task(arrive())
    try:
        yield outcomes
    finally:
        arrivals.cancel()
        await asyncio.gather(*asking)


def _multiplier(site: ProcessDeployment) -> float:
    """Return the multiplier of the threshold on the path from east to west."""
    for line in get_text(f"{site.manager_url}/metrics").splitlines():
        if (
            line.startswith("prfaas_manager_path_threshold_multiplier")
            and 'source="east"' in line
            and 'destination="west"' in line
        ):
            return float(line.rpartition(" ")[2])
    return 0.0


def _num_changes(site: ProcessDeployment) -> int:
    return site.manager.log.read_text().count("threshold.multiplier_changed")


async def _state(site: ProcessDeployment, outcomes: list[Outcome], reason: str, *, raised: bool) -> None:
    """Wait until an answer that ended from here on has this reason, and t is raised, or as configured."""
    start = len(outcomes)
    await until(
        lambda: any(outcome.reason == reason for outcome in outcomes[start:]), seconds=STATE_SECONDS, what=reason
    )
    await until(lambda: (_multiplier(site) > 1) == raised, seconds=STATE_SECONDS, what=f"raised: {raised}")


# It returns after 40 s of calm at the soonest: tests/unit/scheduler/test_congestion.py and the twin see that at once.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("returns", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["rises", "returns"])
async def test_threshold_follows_the_link_and_no_request_fails(site: ProcessDeployment, returns: bool) -> None:
    async with _load(site) as outcomes:
        await _state(site, outcomes, "long", raised=False)
        site.relays["west"].reshape(NARROW)
        await _state(site, outcomes, "congested", raised=True)
        site.relays["west"].reshape(WIDE)
        if returns:
            await _state(site, outcomes, "long", raised=False)
    assert all(outcome.is_whole for outcome in outcomes)
    assert 1 + returns <= _num_changes(site) <= MAX_CHANGES

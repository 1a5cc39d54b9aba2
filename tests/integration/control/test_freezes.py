"""Each process is frozen under load, as a stalled machine or heavy swapping freezes it: no request waits for it for long."""

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from prfaas.index.store.redis_store import START_ID, RedisStore
from prfaas.manager.record.cluster_writer import RELOAD
from prfaas.types import ClusterName
from tests.support.open_loop import Answer, OpenLoop
from tests.support.paused_process import paused, resume, stop
from tests.support.process_deployment import REQUEST_SECONDS, ask, client, fresh_prompt
from tests.support.replicated_deployment import ROLES, ReplicatedDeployment, T, running_replicated, until_sums_agree
from tests.support.waiting import until
from tools.demo.client import get_json
from tools.paced_engine.server import Pace

SHORT_SECONDS, LONG_SECONDS = 8.0, 45.0
INTERVAL_SECONDS = 0.25
USUAL_SECONDS = 1.0  # Less than this is not a delay on a busy machine.
MAX_ADDED_SECONDS = 5.0
MAX_DETECTION_SECONDS = 12.0  # Two to four seconds on an idle machine. A node expires after 30 s.
SECONDS_AFTER = 5.0
LENGTHS = (T // 2, 2 * T, 3 * T)
PACE = Pace(0.02, 1e-4, 0.005)  # The defaults of the paced engine.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedDeployment]:
    with running_replicated(tmp_path_factory.mktemp("site")) as made:
        yield made


@dataclass(frozen=True)
class Harm:
    """Effect of a fault on the requests under way meanwhile.

    A decode engine that freezes after the first token breaks its answers, since no other engine can go on with them.
    """

    num_requests: int
    num_delayed: int
    worst_added_seconds: float
    num_failed: int
    num_broken: int

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_delayed / self.num_requests:.1%} delayed, "
            f"at most {self.worst_added_seconds:.2f} s, {self.num_failed} failed, {self.num_broken} broken"
        )


async def freeze(site: ReplicatedDeployment, role: str, seconds: float) -> Harm:
    """Freeze a process under load, and compare times to the first token with local prefills."""
    load = OpenLoop(site.router_url, interval_seconds=INTERVAL_SECONDS, lengths=LENGTHS)
    async with load.running():
        await until(lambda: len(load.answers) >= 12, seconds=90, what="answers before the fault")
        stop(site.child_of(role).process.pid)
        began = time.monotonic()
        try:
            await asyncio.sleep(seconds)
        finally:
            resume(site.child_of(role).process.pid)
        await asyncio.sleep(SECONDS_AFTER)
    affected = [
        answer for answer in load.answers if answer.asked_at + REQUEST_SECONDS > began and _ends(answer) > began
    ]
    served = [answer for answer in affected if answer.outcome.token_ids]
    added = [answer.ttft_seconds - PACE.prefill(answer.num_tokens) for answer in served]
    return Harm(
        len(affected),
        sum(item > USUAL_SECONDS for item in added),
        max(added),
        len(affected) - len(served),
        sum(not answer.outcome.is_whole for answer in served),
    )


def _ends(answer: Answer) -> float:
    return answer.asked_at + min(answer.ttft_seconds, REQUEST_SECONDS)


async def epochs_of(redis_url: str, cluster: ClusterName) -> list[int]:
    """Return the lease epochs of a cluster's stream, after checking that each entry follows the one before it."""
    store = RedisStore(redis_url)
    entries = await store.tail(cluster, START_ID)
    await store.close()
    for before, entry in itertools.pairwise(entries):
        assert entry.before in (before.id, RELOAD), f"{entry.id} follows {entry.before}, not {before.id}"
    return [int(entry.id.partition("-")[0]) for entry in entries]


@pytest.mark.timeout(300)
async def test_no_request_waits_for_a_frozen_manager_which_writes_nothing_after_it_wakes(
    site: ReplicatedDeployment,
) -> None:
    assert site.writers() == {"east": site.manager_grpcs[0], "west": site.manager_grpcs[0]}
    harm = await freeze(site, "manager", SHORT_SECONDS)
    await until_sums_agree(site)
    assert (harm.num_failed, harm.num_broken) == (0, 0)
    assert harm.worst_added_seconds <= MAX_ADDED_SECONDS
    assert site.writers() == {"east": site.manager_grpcs[1], "west": site.manager_grpcs[1]}
    for cluster in ("east", "west"):
        epochs = await epochs_of(site.redis_url, ClusterName(cluster))
        assert epochs == sorted(epochs) and len(set(epochs)) == 2


@pytest.mark.timeout(300)
async def test_all_managers_send_nothing_new_to_a_frozen_process_until_it_answers(site: ReplicatedDeployment) -> None:
    def is_resting(*instances: str) -> bool:
        states = [get_json(f"{url}/state") for url in site.manager_urls]
        return all(state.get("resting_instances", []) == [*instances] for state in states)

    for role in ("decode agent", "prefill agent", "decode engine", "prefill engine"):
        instance = "w0/0" if role.startswith("decode") else "e0/0"
        await until(is_resting, seconds=30, what="every instance")
        with paused(site.child_of(role).process.pid):
            began = time.monotonic()
            await until(partial(is_resting, instance), seconds=30, what=f"{role} at rest")
            assert time.monotonic() - began < MAX_DETECTION_SECONDS, role
    await until(is_resting, seconds=30, what="every instance again")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["decode agent", "decode engine"])
async def test_a_request_waits_seconds_for_a_frozen_agent_or_engine(site: ReplicatedDeployment, role: str) -> None:
    harm = await freeze(site, role, SHORT_SECONDS)
    await until_sums_agree(site)
    assert harm.num_failed == 0
    assert harm.worst_added_seconds <= MAX_ADDED_SECONDS


@pytest.mark.timeout(300)
async def test_a_long_prompt_does_not_wait_for_a_frozen_prefill_engine(tmp_path: Path) -> None:
    """A local prefill takes 60 s, so the decode engine itself would wait 18 s for the next byte."""
    flags = ["--prefill-seconds-per-token=0.06"]
    with running_replicated(tmp_path, engine_flags=flags) as site, contextlib.ExitStack() as frozen:
        async with client() as session:
            asking = asyncio.create_task(ask(session, site.router_url, fresh_prompt(1000)))
            await asyncio.sleep(0.5)
            for instance in ("e0/0", "e1/0"):
                frozen.enter_context(paused(site.engines[instance].process.pid))
            await until(lambda: "incomplete" in site.transfer_ends("received").values(), seconds=12, what="the end")
            asking.cancel()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ROLES)
async def test_no_request_waits_45_seconds_for_a_frozen_process(
    site: ReplicatedDeployment, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm = await freeze(site, role, LONG_SECONDS)
    await until_sums_agree(site)
    with capsys.disabled():
        sys.stdout.write(f"\n{role}: {harm}\n")
    assert harm.num_failed == 0
    assert harm.worst_added_seconds <= MAX_ADDED_SECONDS
    assert role == "decode engine" or not harm.num_broken

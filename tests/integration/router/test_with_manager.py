"""Router with a real manager, and without it after its end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import RouterConfig
from prfaas.router.server import open_router
from prfaas.scheduler.route import NO_LAYOUT, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from tests.integration.console.terminal import run_here, run_here_on_terminal
from tests.integration.router.managed import PROMPT, SETTINGS, Managed, T, make_managed
from tests.support.deployment import SECRET
from tests.support.paced_engine import MODEL
from tests.support.router import running_router
from tests.support.waiting import PATIENCE_SECONDS, until

DECIDED = ("route", "reason", "decode", "prefill", "decided_by", "num_prompt_tokens", "num_cached_tokens")


@pytest.fixture
async def managed(tmp_path: Path) -> AsyncIterator[Managed]:
    async with make_managed(tmp_path) as made:
        await made.router.until_health(**{"east_0": True, "west-0_0": True})
        yield made


async def test_manager_decides_long_prompts_with_its_grant_and_threshold(managed: Managed) -> None:
    record = await managed.router.decided(PROMPT)
    assert (record["decided_by"], record["route"], record["reason"]) == ("manager", "remote", "long")
    assert NO_LAYOUT not in str(record["explanation"])
    text = managed.router.west.bodies[0]["kv_transfer_params"]["prfaas_grant"]
    grant = grants.verify(grants.from_text(text), grants.derive_key(SECRET, "grant"), kind="transfer", now=0.0)
    assert grant.transfer_id.hex() == record["transfer_id"]
    assert grant.prompt_hash == HashChain(root_hash(MODEL), PROMPT[:-1]).at(len(PROMPT) - 1)
    assert (grant.source, grant.destination, grant.destination_address) == ("east", "west-0", "west-0:7400")


async def test_explanation_mentions_a_model_without_a_layout(tmp_path: Path) -> None:
    async with make_managed(tmp_path, layouts=()) as managed:
        await managed.router.until_health(**{"east_0": True, "west-0_0": True})
        record = await managed.router.decided(PROMPT)
    assert record["decided_by"] == "manager"
    assert NO_LAYOUT in str(record["explanation"])


async def test_explain_joins_the_record_of_the_router_and_the_decision_of_the_manager(managed: Managed) -> None:
    record = await managed.router.decided(PROMPT)
    decided = bytes.fromhex(str(record["decision_id"]))
    await until(lambda: managed.manager.service.outcomes.get(decided), what="the report")
    flags = [f"--routers={managed.router.url}", f"--pages=http://{managed.manager.http_address}", "--timeout=60"]
    ran = await asyncio.to_thread(run_here, "explain", str(record["request_id"]), *flags)
    assert (ran.document["status"], ran.document["threshold_tokens"]) == (200, T), ran.error
    assert ran.document["num_uncached_tokens"] == len(PROMPT)
    seen = await asyncio.to_thread(run_here_on_terminal, "explain", str(record["request_id"]), *flags)
    assert all(title in seen.output for title in ("Time to first token", "Cost of each route", "Candidates"))


async def test_manager_gets_reports_of_completed_requests(managed: Managed) -> None:
    answered = managed.manager.service.outcomes
    decided = bytes.fromhex(str((await managed.router.decided(PROMPT))["decision_id"]))
    await until(lambda: answered.get(decided), what="the report")
    ended = answered.get(decided)
    assert ended is not None and ended.outcome == "completed"
    assert sorted(ended.phases) == ["decide", "handover", "leg"]
    assert sum(ended.phases.values()) == pytest.approx(ended.ttft_seconds)


async def test_cached_prefix_keeps_a_long_prompt_local(managed: Managed) -> None:
    await managed.hold(PROMPT[:160])
    record = await managed.router.decided(PROMPT)
    assert (record["decided_by"], record["reason"], record["num_cached_tokens"]) == ("manager", "short", 160)
    assert managed.router.west.bodies[-1]["kv_transfer_params"] == {"prfaas_promised_tokens": 160}


async def test_short_prompt_is_decided_without_the_manager(managed: Managed) -> None:
    record = await managed.router.decided(PROMPT[:T])
    assert (record["decided_by"], record["reason"]) == ("router", "short")


async def test_router_continues_without_the_manager(managed: Managed) -> None:
    await managed.deployment.stop_manager(managed.manager)
    record = await managed.router.decided(PROMPT)
    assert (record["decided_by"], record["route"], record["reason"]) == ("router", "remote", "long")
    assert record["status"] == 200


async def test_retry_excludes_the_failed_node_at_the_manager(tmp_path: Path) -> None:
    async with make_managed(tmp_path, num_wests=2) as managed:
        names = ("east_0", "west-0_0", "west-1_0")
        await managed.router.until_health(**dict.fromkeys(names, True))
        managed.router.west.break_after_tokens = 0  # The engine closes the connection before a first token.
        record: dict[str, Any] = {"failures": []}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not record[
                "failures"
            ]:  # Equal nodes are chosen by the seed, which leads to the broken node at some point.
                _, _, headers = await managed.router.post({"prompt": PROMPT, "stream": True})
                _, record = await managed.router.get(f"/debug/decision/{headers['x-request-id']}")
                assert (record["decided_by"], record["status"]) == ("manager", 200)
                assert record["decode"] == "west-1/0"
        assert record["failures"][0].startswith("decode_broke_off")


async def test_router_with_another_secret_serves_nobody_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_managed(tmp_path, router_secret=b"x" * 32) as managed:
        await until(lambda: "manager.watch_refused" in caplog.text)
        assert await managed.router.health() == {}
        assert (await managed.router.post({"prompt": PROMPT}))[0] == 503


async def test_restarted_manager_removes_no_instance(managed: Managed) -> None:
    for reports in managed.reports:
        await managed.deployment.end(reports)
    address = managed.manager.address
    await managed.deployment.stop_manager(managed.manager)
    await managed.deployment.start_manager(listen=address, threshold_tokens=7 * T)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await managed.router.decided(PROMPT))["reason"] != "short":  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.05)
    assert await managed.router.health() == {"east_0": True, "west-0_0": True}


async def test_routers_of_different_managers_decide_alike(tmp_path: Path) -> None:
    async with make_managed(tmp_path, with_redis=True) as managed:
        second = await managed.deployment.start_manager(threshold_tokens=T)
        await managed.hold(PROMPT[:160])
        await until(lambda: second.world.index.num_blocks() == 11, what="the blocks at the second manager")
        await until(lambda: len(second.world.live()) == 2, what="the nodes at the second manager")
        config = RouterConfig(**SETTINGS, managers=(second.address,))
        async with open_router(config, SECRET) as address:
            routers = managed.router, replace(managed.router, url=f"http://{address}")
            for router in routers:
                await router.until_health(**{"east_0": True, "west-0_0": True})
            prompts = [PROMPT, PROMPT[:T], PROMPT[:150], PROMPT + PROMPT, [*PROMPT[:170], *range(900, 1000)]]
            for prompt in prompts:
                decision, other_decision = [
                    {key: (await router.decided(prompt))[key] for key in DECIDED} for router in routers
                ]
                assert decision == other_decision


async def test_managers_decision_can_be_replayed(managed: Managed) -> None:
    record = await managed.router.decided(PROMPT)
    url = f"http://{managed.manager.http_address}/decisions/"
    async with aiohttp.ClientSession() as session:
        async with session.get(url + str(record["decision_id"])) as answer:
            found = await answer.json()
        async with session.get(url + "00ff") as answer:
            assert answer.status == 404
        async with session.get(url + "nonsense") as answer:
            assert answer.status == 404
    again = route(msgspec.convert(found["snapshot"], Snapshot), msgspec.convert(found["facts"], RequestFacts))
    assert asdict(again) == found["decision"]
    assert (again.route, again.reason) == (record["route"], record["reason"])


def _lonely(manager: str, **settings: Any) -> RouterConfig:
    """Return a router whose manager does not answer."""
    return RouterConfig(**(SETTINGS | {"manager_timeout": 0.25}), managers=(manager,), **settings)


async def test_router_that_starts_alone_serves_from_the_stored_fleet(tmp_path: Path) -> None:
    file = tmp_path / "state" / "fleet.json"
    async with make_managed(tmp_path, fleet_file=file) as managed:
        await managed.router.until_health(**{"east_0": True, "west-0_0": True})
        assert "fleet" not in (await managed.router.get("/health"))[1]
        await managed.deployment.stop_manager(managed.manager)
        async with open_router(_lonely(managed.manager.address, fleet_file=file), SECRET) as address:
            router = replace(managed.router, url=f"http://{address}")
            await router.until_health(**{"east_0": True, "west-0_0": True})
            assert "stale" in (await router.get("/health"))[1]["fleet"]
            record = await router.decided(PROMPT)
            assert (record["decided_by"], record["route"], record["reason"]) == ("router", "remote", "long")


@pytest.mark.parametrize("content", [b"", b"{", b'{"threshold_tokens": "many"}'])
async def test_unreadable_stored_fleet_does_not_stop_the_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "fleet.json"
    file.write_bytes(content)
    async with (
        open_router(_lonely("127.0.0.1:1", fleet_file=file), SECRET) as address,
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/health") as response,
    ):
        assert response.status == 503


async def test_static_clusters_serve_until_a_manager_answers(tmp_path: Path) -> None:
    async with running_router() as beside:
        clusters = beside.clusters
        async with open_router(_lonely("127.0.0.1:1", clusters=clusters), SECRET) as address:
            router = replace(beside, url=f"http://{address}")
            await router.until_health(east_0=True, west_0=True)
            assert (await router.decided(PROMPT))["route"] == "local"
    async with make_managed(tmp_path, clusters=clusters) as managed:
        await managed.router.until_health(**{"east_0": True, "west-0_0": True})
        assert (await managed.router.decided(PROMPT))["decided_by"] == "manager"

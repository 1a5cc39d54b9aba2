"""Rolling restart of every component under load, as docs/deploy.md describes: no request fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.console.terminal import run
from tests.support.open_loop import OpenLoop
from tests.support.replicated_deployment import ReplicatedDeployment, T, running_replicated
from tests.support.waiting import until
from tools.demo.client import get_json, is_answering

INTERVAL_SECONDS = 0.25
LENGTHS = (T // 2, 2 * T, 3 * T)
ANSWERS_BETWEEN = 8  # Answers to wait for after each restart, so that everything works before the next one.


async def _restart_manager(site: ReplicatedDeployment, number: int) -> None:
    site.managers[number] = await asyncio.to_thread(site.children.restart, site.managers[number])
    await until(lambda: is_answering(f"{site.manager_urls[number]}/readyz"), what="the manager")


async def _restart_node(site: ReplicatedDeployment, name: str) -> None:
    """Drain a node with the console's command, then restart its agent and its engine."""
    flags = [f"--managers={','.join(site.manager_grpcs)}", f"--secret-file={site.secret_file}", "--within=60s"]
    drained = await asyncio.to_thread(run, "drain", name, *flags)
    assert drained.document["num_requests_left"] == 0, drained
    agent, instance = site.agents[name], f"{name}/0"
    site.agents[name] = replace(agent, child=await asyncio.to_thread(site.children.restart, agent.child))
    site.engines[instance] = await asyncio.to_thread(site.children.restart, site.engines[instance])


async def _is_whole(site: ReplicatedDeployment) -> None:
    """Wait until both managers rest no instance, and the router finds all engines healthy."""
    for url in site.manager_urls:
        await until(lambda url=url: not get_json(f"{url}/state").get("resting_instances"), what="a whole deployment")  # type: ignore[misc]
    await until(site.is_healthy, what="healthy engines")


@pytest.mark.soak  # Half a minute, in which eight processes are replaced.
@pytest.mark.timeout(300)
async def test_no_request_fails_while_every_component_is_restarted(tmp_path: Path) -> None:
    with running_replicated(tmp_path) as site:
        beside, url = site.start_second_router()
        before = {child.process.pid for child in (beside, *site.processes.values())}
        loads = [OpenLoop(door, interval_seconds=INTERVAL_SECONDS, lengths=LENGTHS) for door in (site.router_url, url)]
        async with loads[0].running():
            async with loads[1].running():
                for restart in (
                    _restart_manager(site, 0),
                    _restart_manager(site, 1),
                    _restart_node(site, "w0"),
                    _restart_node(site, "e0"),
                ):
                    await restart
                    await _is_whole(site)
                    wanted = len(loads[0].answers) + ANSWERS_BETWEEN
                    await until(lambda wanted=wanted: len(loads[0].answers) >= wanted, what="more answers")  # type: ignore[misc]
            beside = await asyncio.to_thread(site.children.restart, beside)  # A load balancer has taken it out.
            await until(lambda: is_answering(f"{url}/health"), what="the router")
    outcomes = [answer.outcome for load in loads for answer in load.answers]
    assert Counter(outcome.error for outcome in outcomes if not outcome.is_whole) == {}
    assert {outcome.reason for outcome in outcomes} >= {"short", "long"}
    after = {child.process.pid for child in (beside, *site.processes.values())}
    assert len(before - after) == 7, "two managers, two agents, two engines, one router"

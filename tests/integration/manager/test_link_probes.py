"""A manager and real agents: a link that nobody knows is probed once, and nothing of it is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import REGISTRY

from tests.integration.agent.running import Agents
from tests.integration.manager.deployment import SECRET, Deployment
from tests.integration.manager.site import Site
from tests.integration.manager.test_planning import FILE
from tests.waiting import until
from tools.demo.client import get_json, get_text


def _ended() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_link_probes_total", {"outcome": "completed"}) or 0.0


@asynccontextmanager
async def _planning_site(deployment: Deployment, directory: Path) -> AsyncIterator[Site]:
    file = directory / "deployment.yaml"
    file.write_text(FILE)
    made = Site(deployment, await deployment.start_manager(deployment=file), Agents(directory, SECRET))
    yield made
    await made.close()


async def _nodes(site: Site, **of_receiver: str) -> None:
    site.agents["p1"] = await site.agent("p1", "prfaas", **{"cluster-kind": "prfaas"})
    site.agents["d1"] = await site.agent("d1", "pd", **of_receiver)


async def test_a_link_that_nobody_knows_is_probed_under_the_managers_grant(
    deployment: Deployment, tmp_path: Path
) -> None:
    before = _ended()
    async with _planning_site(deployment, tmp_path) as site:
        await _nodes(site)
        await until(lambda: _ended() == before + 1, what="the end of a probe")
        assert site.manager._link_probes._under_way == {}
        sender, receiver = (get_json(f"http://{site.agents[name].status}/status") for name in ("p1", "d1"))
        pages = [get_text(f"http://{site.agents[name].status}/metrics") for name in ("p1", "d1")]
    assert 'prfaas_agent_link_probes_total{direction="out",outcome="completed"} 1.0' in pages[0]
    assert 'prfaas_agent_link_probes_total{direction="in",outcome="taken"} 1.0' in pages[1]
    (link,) = sender["links"]
    assert link["peer"] == "d1" and not link["is_probing"]
    assert (receiver["receiving"], receiver["pool"]["transfer"], receiver["pool"]["prefix"]) == (0, 0, 0)


async def test_an_agent_that_takes_no_probes_gets_none(deployment: Deployment, tmp_path: Path) -> None:
    async with _planning_site(deployment, tmp_path) as site:
        await _nodes(site, **{"link-probe-bytes": "0"})
        site.manager._link_probes.step()
        assert site.manager._link_probes._under_way == {}

"""Manager and real agents: an unknown link is probed once, and no data of the probe is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import REGISTRY

from tests.integration.manager.test_planning import FILE
from tests.support.agent_deployment import AgentDeployment
from tests.support.agents import Agents
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import until
from tools.demo.client import get_json, get_text


def _ended() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_link_probes_total", {"outcome": "completed"}) or 0.0


@asynccontextmanager
async def _planning_site(deployment: Deployment, directory: Path) -> AsyncIterator[AgentDeployment]:
    file = directory / "deployment.yaml"
    file.write_text(FILE)
    made = AgentDeployment(deployment, await deployment.start_manager(deployment=file), Agents(directory, SECRET))
    try:
        yield made
    finally:
        await made.close()


async def _nodes(site: AgentDeployment) -> None:
    """A node of each cluster."""
    site.agents["p1"] = await site.agent("p1", "prfaas", **{"cluster-kind": "prfaas"})
    site.agents["d1"] = await site.agent("d1", "pd")


async def test_unknown_link_is_probed_with_a_grant(deployment: Deployment, tmp_path: Path) -> None:
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

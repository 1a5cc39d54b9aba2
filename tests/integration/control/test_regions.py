"""The KV of a tenant that is bound to a region stays there, in a deployment of two regions with two clusters each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas.types import ClusterKind
from tests.support.process_deployment import ProcessDeployment, ask, client, fresh_prompt, running_deployment
from tools.demo.client import get_json, get_text

T = 256
CLUSTERS: dict[str, ClusterKind] = {"west-gpu": "prfaas", "east-gpu": "prfaas", "west": "pd", "east": "pd"}
WEST = ["west-gpu", "west"]
NUM_PROMPTS = 4


@pytest.mark.parametrize("is_bound", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_no_byte_of_a_bound_tenant_leaves_its_region(tmp_path: Path, is_bound: bool) -> None:
    tenant = {"tenant": "acme", "clients": ["default"], "clusters": WEST if is_bound else []}
    settings: dict[str, Any] = {"tenants": [tenant]}
    with running_deployment(
        tmp_path, num_engines=1, clusters=CLUSTERS, router_settings=settings, threshold_tokens=T
    ) as site:
        routes = await _routes(site)
        if is_bound:
            assert routes == {"remote"}
            assert await _status_at(site, "east") == 503
        _end_prefill_in_the_region(site)
        later = await _routes(site)
        outside = sum(_wire_bytes(site, name) for name in CLUSTERS if name not in WEST)
    assert (later, outside > 0) == (({"local"}, False) if is_bound else ({"remote"}, True))


async def _routes(site: ProcessDeployment) -> set[str]:
    """Send long prompts to the west, and return the routes of their whole answers."""
    async with client() as session:
        outcomes = [await ask(session, site.router_urls["west"], fresh_prompt(3 * T)) for _ in range(NUM_PROMPTS)]
    assert all(outcome.is_whole for outcome in outcomes), [outcome.error for outcome in outcomes]
    return {outcome.headers["x-prfaas-route"] for outcome in outcomes}


async def _status_at(site: ProcessDeployment, cluster: str) -> int:
    body = {"model": "paced", "prompt": fresh_prompt(3 * T), "max_tokens": 1}
    async with client() as session, session.post(f"{site.router_urls[cluster]}/v1/completions", json=body) as answer:
        return answer.status


def _end_prefill_in_the_region(site: ProcessDeployment) -> None:
    site.children.stop_child(site.agents["west-gpu"].child)
    site.children.wait_until(site.manager, lambda: "west-gpu" not in _live_nodes(site), seconds=60.0)


def _live_nodes(site: ProcessDeployment) -> set[str]:
    return {node["node"]["name"] for node in get_json(f"{site.manager_url}/state").get("nodes", [])}


def _wire_bytes(site: ProcessDeployment, agent: str) -> float:
    """Return the bytes of chunks that an agent has sent and received."""
    lines = get_text(f"{site.agents[agent].status_url}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("prfaas_agent_wire_bytes_total"))

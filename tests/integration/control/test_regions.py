"""Two regions with two clusters each, one link down, and a tenant whose KV stays in its region."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.model.capacity.bound import lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace
from prfaas.types import ClusterKind
from tests.integration.control.shifted_mix import plan_of
from tests.support.process_deployment import ProcessDeployment, ask, client, fresh_prompt, running_deployment
from tests.support.secret_files import write_secret
from tests.support.waiting import until
from tools.demo.client import get_text
from tools.link import Filter

FILE = """
model: internal-1t-hybrid
trace: "lognormal:mu=6,sigma=0.6,min=100,max=2000,output=40"
prfaas:
  - {name: west-gpu, profile: h200-internal-1t, instances: 1}
  - {name: east-gpu, profile: h200-internal-1t, instances: 1}
pd:
  - {name: west, profile: h20-internal-1t, instances: 1}
  - {name: east, profile: h20-internal-1t, instances: 1}
links:
  - {source: west-gpu, target: west, bandwidth: 1.6Gbps}
  - {source: west-gpu, target: east, bandwidth: 1.6Gbps}
  - {source: east-gpu, target: west, bandwidth: 1.6Gbps}
  - {source: east-gpu, target: east, bandwidth: 1.6Gbps}
"""
CLUSTERS: dict[str, ClusterKind] = {"west-gpu": "prfaas", "east-gpu": "prfaas", "west": "pd", "east": "pd"}
WEST = ["west-gpu", "west"]
DOWN = ("west-gpu", "west")
PROMPT_TOKENS = 1024  # More than any plan's threshold.
NUM_PROMPTS = 4


@pytest.mark.timeout(400)
async def test_plan_leaves_out_a_down_link_and_no_byte_of_a_bound_tenant_leaves_its_region(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(FILE)
    settings: dict[str, Any] = {
        "api_keys_file": str(write_secret(tmp_path / "keys", "a acme\nb other\n")),
        "tenants": [{"tenant": "bound", "clients": ["acme"], "clusters": WEST}],
    }
    with running_deployment(
        tmp_path, num_engines=1, clusters=CLUSTERS, router_settings=settings, deployment=str(file)
    ) as site:
        await until(lambda: _planned(site) == pytest.approx(_bound(file), rel=0.01), seconds=120, what="the plan")
        assert await _reasons_and_outside_bytes(site, "a") == ({"long"}, 0)
        assert await _status_at(site, "east", "a") == 503
        source, target = DOWN
        site.relays[target].filter(_refusing(source))
        site.relays[source].filter(_refusing(target))  # The receiver would dial instead.
        without = pytest.approx(_bound(file, down=DOWN), rel=0.01)
        await until(lambda: _planned(site) == without, seconds=120, what="the plan without the link")
        assert await _reasons_and_outside_bytes(site, "a") == ({"link_down"}, 0)
        reasons, num_bytes = await _reasons_and_outside_bytes(site, "b")
        assert reasons == {"long"} and num_bytes > 0


def _refusing(name: str) -> Callable[[], Filter]:
    """Return a filter for each connection, which ends if the agent `name` has dialled."""

    def check(piece: bytes) -> bytes:
        if name.encode() in piece:  # In its HELLO.
            raise ConnectionResetError
        return piece

    return lambda: check


def _planned(site: ProcessDeployment) -> float:
    return float(plan_of(site).get("requests_per_second", 0.0))


def _bound(file: Path, *, down: tuple[str, str] | None = None) -> float:
    """Return the most that any routing could sustain on one instance of both roles in each PD cluster."""
    deployment, written = read_deployment(file)
    pd = tuple(replace(cluster, shared_instances=1, num_prefill=None) for cluster in deployment.pd)
    paths = tuple(path for path in deployment.paths if (path.source, path.target) != down)
    loads = LoadModel(replace(deployment, pd=pd, paths=paths), find_trace(written.trace, beside=None))
    return whole_bound(loads, lp_bound(loads)).system_throughput


async def _reasons_and_outside_bytes(site: ProcessDeployment, key: str) -> tuple[set[str], float]:
    """Send long prompts to the west. Return the reasons, and the bytes that agents outside the region moved."""
    before = _outside_bytes(site)
    async with client() as session:
        outcomes = [
            await ask(session, site.router_urls["west"], fresh_prompt(PROMPT_TOKENS), key=key)
            for _ in range(NUM_PROMPTS)
        ]
    assert all(outcome.is_whole for outcome in outcomes), [outcome.error for outcome in outcomes]
    return {outcome.reason for outcome in outcomes}, _outside_bytes(site) - before


def _outside_bytes(site: ProcessDeployment) -> float:
    pages = [get_text(f"{site.agents[name].status_url}/metrics") for name in CLUSTERS if name not in WEST]
    lines = [line for page in pages for line in page.splitlines() if line.startswith("prfaas_agent_wire_bytes_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def _status_at(site: ProcessDeployment, cluster: str, key: str) -> int:
    body = {"model": "paced", "prompt": fresh_prompt(PROMPT_TOKENS), "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        client() as session,
        session.post(f"{site.router_urls[cluster]}/v1/completions", json=body, headers=headers) as answer,
    ):
        return answer.status

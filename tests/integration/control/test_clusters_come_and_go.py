"""PrfaaS clusters come and go: prompts stay while there is none, and long ones go remote again later."""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from prfaas.types import ClusterKind
from tests.support.process_deployment import ProcessDeployment, ask, client, fresh_prompt, running_deployment

T = 256
STATE_SECONDS = 120.0
FOUR: Mapping[str, ClusterKind] = {"east": "prfaas", "north": "prfaas", "west": "pd", "south": "pd"}


async def _until_reason(site: ProcessDeployment, reason: str, *, cluster: str = "west") -> None:
    """Ask with long prompts until one is decided so; every one on the way is answered in full."""
    async with asyncio.timeout(STATE_SECONDS), client() as session:
        while True:
            outcome = await ask(session, site.router_urls[cluster], fresh_prompt(2 * T))
            assert outcome.is_whole, outcome.error
            if outcome.reason == reason:
                return


async def _until_prefilled_by(site: ProcessDeployment, cluster: str, instance: str) -> None:
    """Ask with long prompts until `instance` has prefilled one more for `cluster`."""
    before = site.transfers(instance)["sent"]
    async with asyncio.timeout(STATE_SECONDS):
        while site.transfers(instance)["sent"] == before:
            await _until_reason(site, "long", cluster=cluster)


@pytest.mark.timeout(600)
async def test_remaining_prfaas_cluster_serves_all_pd_clusters(tmp_path: Path) -> None:
    with running_deployment(tmp_path, num_engines=1, clusters=FOUR, threshold_tokens=T, expiry_seconds="3s") as site:
        for prefill, pd in itertools.product(("east/0", "north/0"), ("west", "south")):
            await _until_prefilled_by(site, pd, prefill)
        site.agents["north"].child.process.kill()
        for pd in ("west", "south"):
            await _until_prefilled_by(site, pd, "east/0")
        site.agents["east"].child.process.kill()
        for pd in ("west", "south"):
            await _until_reason(site, "no_prefill_instance", cluster=pd)
        site.kill_agent("north")
        for pd in ("west", "south"):
            await _until_prefilled_by(site, pd, "north/0")

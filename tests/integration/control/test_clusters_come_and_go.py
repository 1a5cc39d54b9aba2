"""Spot capacity: while no PrfaaS cluster lives all prompts stay, and when it returns the long ones go there again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.control.site import Site, ask, client, fresh_prompt, running_site

T = 256
STATE_SECONDS = 60.0


async def _until_reason(site: Site, reason: str) -> None:
    """Ask with long prompts until one is decided so; every one on the way is answered in full."""
    async with asyncio.timeout(STATE_SECONDS), client() as session:
        while True:
            outcome = await ask(session, site.router_url, fresh_prompt(2 * T))
            assert outcome.is_whole, outcome.error
            if outcome.reason == reason:
                return


@pytest.mark.timeout(240)
async def test_long_prompts_stay_while_the_only_prfaas_cluster_is_away_and_leave_when_it_returns(
    tmp_path: Path,
) -> None:
    with running_site(tmp_path, num_engines=1, threshold_tokens=T, expiry_seconds="3s") as site:
        await _until_reason(site, "long")
        site.agents["east"].child.process.kill()
        await _until_reason(site, "no_prefill_instance")
        site.kill_agent("east")
        await _until_reason(site, "long")

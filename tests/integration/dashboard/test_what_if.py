"""Panel for hypothetical plans in Chromium: questions to the solver about the live instances, with the keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.dashboard.browser import Window, chromium, until_true
from tests.support.deployment import Deployment
from tests.support.waiting import until

FILE = """
model: internal-1t-hybrid
trace: lognormal
prfaas:
  - {name: east, profile: h200-internal-1t, instances: 9, bandwidth: 100Gbps}
pd:
  - {name: west, profile: h20-internal-1t, instances: 9}
"""


@pytest.mark.timeout(240)
async def test_hypothetical_plan_shows_beside_the_present_one(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(FILE)
    async with chromium() as open_window, Deployment(tmp_path) as deployment:
        manager = await deployment.start_manager(deployment=tmp_path / "deployment.yaml")
        for name, cluster, role in (("i1", "west", "prefill"), ("d1", "west", "decode")):
            deployment.run(deployment.reporter(name, manager, cluster=cluster, role=role))  # type: ignore[arg-type]
        deployment.run(deployment.reporter("p1", manager, cluster="east", kind="prfaas", role="prefill"))
        window = await open_window()
        await until(lambda: len(manager.world.live()) == 3, what="three nodes")
        await window.page.goto(f"http://{manager.http_address}/")
        field = window.page.locator("[name='west/instances']")
        await field.wait_for()
        await window.page.locator("#what-if-reset").click()
        await window.page.locator("[name='west/num_prefill']").fill("")
        await field.fill("6")
        await field.press("Enter")
        await window.page.locator("#what-if-table tbody tr").first.wait_for()
        shown = await window.page.locator("#what-if-table tbody tr").all_inner_texts()
        (today, then) = (float(word) for word in shown[0].split("\t")[1:])
        assert then > today > 0
        await until_true(lambda: _has_status(window, "more than today"))
        assert await window.faults() == []
        assert window.errors == []


async def _has_status(window: Window, words: str) -> bool:
    return words in await window.text("#what-if-status")

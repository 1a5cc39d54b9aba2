"""Router, manager and paced engines while the price of egress changes with the hour."""

import asyncio
import time
from pathlib import Path

from tests.integration.router.managed import Managed, make_managed
from tests.support.waiting import PATIENCE_SECONDS

NIGHT, DAY = 3 * 3600.0, 12 * 3600.0
FILE = """
model: Qwen3-8B
trace: lognormal:mu=5,sigma=1,min=16,max=2Ki,output=16
prfaas:
  - {name: east, hardware: H100, instances: 1, bandwidth: 100Gbps, price: 30, egress_price: "0, 1@8-20"}
pd:
  - {name: west, hardware: H100, instances: 1, price: 30}
"""


class SteppedClock:
    """Wall clock that goes on from a time of day that tests set."""

    def __init__(self, seconds: float) -> None:
        self._offset = 0.0
        self.set(seconds)

    def __call__(self) -> float:
        return time.time() + self._offset

    def set(self, seconds: float) -> None:
        self._offset = seconds - time.time() % 86400


async def test_long_prompts_stay_while_egress_is_dear_and_leave_again_when_it_is_free(tmp_path: Path) -> None:
    file, clock = tmp_path / "deployment.yaml", SteppedClock(NIGHT)
    file.write_text(FILE)
    settings = {"deployment": file, "wall_clock": clock}
    async with make_managed(tmp_path, manager_settings=settings) as managed:
        for seconds, expected in ((NIGHT, "remote"), (DAY, "local"), (NIGHT, "remote")):
            clock.set(seconds)
            await _until_route(managed, expected)
            plan = managed.manager.world.plan
            assert plan is not None
            assert (plan.offload_ratio > 0, "egress prices" in plan.inputs) == (expected == "remote", seconds == DAY)


async def _until_route(managed: Managed, expected: str) -> None:
    """Ask for answers to a long prompt until its route is the expected one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await managed.router.decided(list(range(1, 1601))))["route"] != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

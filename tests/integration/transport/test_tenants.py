"""Tenants share an emulated link, with real TCP."""

import pytest

from benchmarks.transport.link_ends import Ends
from tools.wan import Wan, WanShape, obstacle

MIB = 1 << 20
MAX_SLOWDOWN = 2.2  # Of one prompt beside another tenant's prompts, relative to an idle link.
pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    "shape", [WanShape(200e6, 0.020), pytest.param(WanShape(1e9, 0.040), marks=pytest.mark.soak)], ids=["slow", "fast"]
)
def test_fifty_prompts_of_one_tenant_delay_a_prompt_of_another_to_about_twice_its_time(shape: WanShape) -> None:
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    with Wan(shape) as wan, Ends(wan, pool_bytes=32 * MIB) as ends:
        found = ends.crowd(50, crowd_bytes=32 * MIB, own_bytes=32 * MIB, after_seconds=2.0)
    assert found["num_left"] > 25, "the other tenant's prompts are under way"
    assert found["beside_seconds"] < MAX_SLOWDOWN * found["alone_seconds"]

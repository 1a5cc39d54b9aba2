"""The wire over an emulated long link between two network namespaces."""

from __future__ import annotations

import pytest

from benchmarks.transport.ours import Ends
from tools.wan import PROFILES, Wan, obstacle

MIB = 1 << 20
pytestmark = [pytest.mark.root, pytest.mark.skipif(obstacle() is not None, reason=f"an emulated link {obstacle()}")]


@pytest.mark.parametrize(("profile", "num_connections"), [("metro", 2), ("continental", 8)])
def test_every_byte_arrives_over_as_many_connections_as_the_round_trip_asks_for(
    profile: str, num_connections: int
) -> None:
    with Wan(PROFILES[profile]) as wan, Ends(wan, pool_bytes=16 * MIB) as ends:
        ends.transfer(16 * MIB, num_layers=16)
        assert ends.transfer(16 * MIB, num_layers=16).num_connections == num_connections

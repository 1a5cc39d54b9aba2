"""Transfers over an emulated long link between two network namespaces."""

import pytest

from benchmarks.transport.link_ends import Ends
from tools.wan import CARRIERS, PROFILES, Carrier, Wan, WanShape, obstacle

MIB = 1 << 20
pytestmark = pytest.mark.root


@pytest.fixture(params=[pytest.param(name, id=name) for name in CARRIERS])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    name: Carrier = request.param
    if reason := obstacle(name):
        pytest.skip(f"a link by {name} {reason}")
    return name


@pytest.mark.parametrize(("profile", "num_connections"), [("metro", 2), ("continental", 8)])
def test_transfer_fills_the_link_over_the_expected_number_of_connections(
    profile: str, num_connections: int, carrier: Carrier
) -> None:
    with Wan(PROFILES[profile], carrier=carrier) as wan, Ends(wan, pool_bytes=16 * MIB) as ends:
        ends.transfer(16 * MIB, num_layers=16)
        measured = ends.transfer(16 * MIB, num_layers=16)
    assert measured.num_connections == num_connections
    assert measured.seconds > 16 * MIB / wan.shape.payload_bytes_per_second


@pytest.mark.soak
def test_number_of_connections_grows_on_a_long_link(carrier: Carrier) -> None:
    with Wan(WanShape(6e8, 0.5), carrier=carrier) as wan, Ends(wan, pool_bytes=256 * MIB) as ends:
        counts = (ends.transfer(256 * MIB, num_layers=1).num_connections for _ in range(8))
        assert any(count > 8 for count in counts)

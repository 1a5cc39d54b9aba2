"""An index whose blocks come and go keeps its size."""

import pytest

from benchmarks.index import churn

LOOP_STALL_MILLISECONDS = 10.0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shares_cell", [False, True])
def test_a_million_blocks_with_100_000_replaced_each_second_take_constant_memory(*, shares_cell: bool) -> None:
    found = churn.measure(num_blocks=1_000_000, blocks_per_second=100_000, seconds=600.0, shares_cell=shares_cell)
    assert found["blocks"] == pytest.approx(1_000_000, rel=0.01)
    assert found["blocks_per_second"] > 95_000, "this machine is too busy to tell"
    assert found["runs_after"] <= found["runs_before"] * 1.01
    assert found["bytes_grown_per_block_moved_in_second_half"] < 0.1, "a block takes 16 bytes or more while it is there"
    assert found["megabytes_after"] < 1.25 * found["megabytes_before"]
    assert found["stall_p99_milliseconds"] < LOOP_STALL_MILLISECONDS

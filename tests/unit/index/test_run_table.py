"""A run packs whatever number of holders its count can say."""

from __future__ import annotations

from prfaas.index.memory import run_table


def test_a_run_leaves_out_holders_beyond_its_maximum() -> None:
    tails = bytes(8)
    full = run_table.pack_holders((holder, 1) for holder in range(run_table.MAX_HOLDERS))
    assert run_table.split(run_table.pack(full, tails)) == (full, tails)
    assert run_table.with_bits(full, run_table.MAX_HOLDERS, 1) == (full, 0)
    changed, new = run_table.with_bits(full, 7, 2)
    assert new == 2 and dict(run_table.unpack_holders(changed))[7] == 3
    fewer, gone = run_table.without_bits(full, 7, 1)
    assert gone == 1
    refilled, new = run_table.with_bits(fewer, run_table.MAX_HOLDERS, 1)
    assert new == 1 and run_table.split(run_table.pack(refilled, tails)) == (refilled, tails)

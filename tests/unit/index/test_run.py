"""A run packs whatever number of holders its count can say."""

from __future__ import annotations

from prfaas.index.memory import run


def test_a_holder_more_than_the_count_can_say_is_not_noted() -> None:
    tails = bytes(8)
    full = run.pack_holders((holder, 1) for holder in range(run.MAX_HOLDERS))
    assert run.split(run.pack(full, tails)) == (full, tails)
    assert run.with_bits(full, run.MAX_HOLDERS, 1) == (full, 0)
    changed, new = run.with_bits(full, 7, 2)
    assert new == 2 and dict(run.unpack_holders(changed))[7] == 3
    fewer, gone = run.without_bits(full, 7, 1)
    assert gone == 1
    refilled, new = run.with_bits(fewer, run.MAX_HOLDERS, 1)
    assert new == 1 and run.split(run.pack(refilled, tails)) == (refilled, tails)

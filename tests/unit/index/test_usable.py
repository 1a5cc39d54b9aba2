"""The rules of `usable_prefix`, one by one; together they are checked against a token-by-token model."""

from __future__ import annotations

import pytest

from prfaas.index.memory.usable import GroupShape, Held, Rules, Usable, leading_ones, usable_prefix

FULL, FULL_64 = GroupShape("full_attention", 16), GroupShape("full_attention", 64)
WINDOW, STATE = GroupShape("sliding_window", 16, 33), GroupShape("linear_state", 0)
NONE = 0


def ones(count: int, *, first: int = 0) -> int:
    return ((1 << count) - 1) << first


@pytest.mark.parametrize(("bits", "count"), [(0, 0), (0b1, 1), (0b1011, 2), (ones(2000), 2000), (ones(5, first=1), 0)])
def test_leading_ones(bits: int, count: int) -> None:
    assert leading_ones(bits) == count


def test_full_attention_ends_at_the_first_gap() -> None:
    assert usable_prefix(Rules([FULL]), Held((0b110111,), (NONE,)), 1000) == Usable(48, 48, "blocks")


def test_the_limit_cuts_to_a_block_end() -> None:
    assert usable_prefix(Rules([FULL]), Held((ones(10),), (NONE,)), 100) == Usable(96, 100, "complete")


def test_a_window_of_33_tokens_needs_two_blocks_before_the_resumption() -> None:
    rules = Rules([FULL, WINDOW])
    assert usable_prefix(rules, Held((ones(10), ones(2, first=5)), (NONE, NONE)), 160).usable_tokens == 7 * 16
    assert usable_prefix(rules, Held((ones(10), ones(1, first=5)), (NONE, NONE)), 160).usable_tokens == 0
    assert usable_prefix(rules, Held((ones(10), 0b1), (NONE, NONE)), 160).usable_tokens == 16, (
        "nothing before the start"
    )


def test_unlike_block_sizes_meet_at_common_multiples() -> None:
    held = Held((ones(2), ones(7)), (NONE, NONE))
    assert usable_prefix(Rules([FULL_64, WINDOW]), held, 1000).usable_tokens == 64


def test_a_state_counts_at_its_exact_length_inside_a_held_block() -> None:
    held = Held((ones(4), 0), (NONE, 0b111), (50, 64, 70))
    assert usable_prefix(Rules([FULL, STATE]), held, 1000) == Usable(64, 64, "blocks")
    assert usable_prefix(Rules([FULL, STATE]), held, 63) == Usable(50, 63, "state")


def test_a_partial_block_carries_the_state_that_ends_where_it_ends() -> None:
    held = Held((ones(4), 0), (0b010, 0b111), (64, 70, 75))
    assert usable_prefix(Rules([FULL, STATE]), held, 1000).usable_tokens == 70


def test_every_linear_group_needs_its_state() -> None:
    held = Held((ones(4), 0, 0), (NONE, 0b11, 0b01), (32, 48))
    assert usable_prefix(Rules([FULL, STATE, STATE]), held, 1000).usable_tokens == 32

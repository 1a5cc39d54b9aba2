"""The rules of `match_prefix`, one by one; together they are checked against a token-by-token model."""

import pytest

from prfaas.kv.group import KVGroup
from prfaas.kv.match import HeldBlocks, MatchRules, PrefixMatch, leading_ones, match_prefix

FULL, FULL_64 = KVGroup("full_attention", 16), KVGroup("full_attention", 64)
WINDOW, STATE = KVGroup("sliding_window", 16, window_tokens=33), KVGroup("linear_state", 0)
NONE = 0


def ones(count: int, *, first: int = 0) -> int:
    return ((1 << count) - 1) << first


@pytest.mark.parametrize(("bits", "count"), [(0, 0), (0b1, 1), (0b1011, 2), (ones(2000), 2000), (ones(5, first=1), 0)])
def test_leading_ones(bits: int, count: int) -> None:
    assert leading_ones(bits) == count


def test_full_attention_ends_at_the_first_gap() -> None:
    assert match_prefix(MatchRules([FULL]), HeldBlocks((0b110111,), (NONE,)), 1000) == PrefixMatch(48, 48, "blocks")


def test_the_limit_cuts_to_a_block_end() -> None:
    assert match_prefix(MatchRules([FULL]), HeldBlocks((ones(10),), (NONE,)), 100) == PrefixMatch(96, 100, "complete")


def test_a_window_of_33_tokens_needs_two_blocks_before_the_resumption() -> None:
    rules = MatchRules([FULL, WINDOW])
    assert match_prefix(rules, HeldBlocks((ones(10), ones(2, first=5)), (NONE, NONE)), 160).usable_tokens == 7 * 16
    assert match_prefix(rules, HeldBlocks((ones(10), ones(1, first=5)), (NONE, NONE)), 160).usable_tokens == 0
    assert match_prefix(rules, HeldBlocks((ones(10), 0b1), (NONE, NONE)), 160).usable_tokens == 16, (
        "nothing before the start"
    )


def test_different_block_sizes_meet_at_common_multiples() -> None:
    held = HeldBlocks((ones(2), ones(7)), (NONE, NONE))
    assert match_prefix(MatchRules([FULL_64, WINDOW]), held, 1000).usable_tokens == 64


def test_a_state_counts_at_its_exact_length_inside_a_held_block() -> None:
    held = HeldBlocks((ones(4), 0), (NONE, 0b111), (50, 64, 70))
    assert match_prefix(MatchRules([FULL, STATE]), held, 1000) == PrefixMatch(64, 64, "blocks")
    assert match_prefix(MatchRules([FULL, STATE]), held, 63) == PrefixMatch(50, 63, "state")


def test_a_partial_block_serves_the_state_of_its_length() -> None:
    held = HeldBlocks((ones(4), 0), (0b010, 0b111), (64, 70, 75))
    assert match_prefix(MatchRules([FULL, STATE]), held, 1000).usable_tokens == 70


def test_every_state_group_needs_its_state() -> None:
    held = HeldBlocks((ones(4), 0, 0), (NONE, 0b11, 0b01), (32, 48))
    assert match_prefix(MatchRules([FULL, STATE, STATE]), held, 1000).usable_tokens == 32

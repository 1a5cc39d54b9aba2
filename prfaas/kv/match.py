"""Prefix match: the longest prefix that all KV groups of one model can serve, from bitmaps of held blocks.

Each group can resume after L tokens if it holds all blocks from its kind's `first_token` up to L, or, for a state, a
checkpoint of exactly L tokens. A block that is not full counts only for the exact length at which it ends. Without
states only multiples of every block size are offered, since an engine resumes at block ends.
"""

import functools
from collections.abc import Sequence
from operator import and_
from typing import Literal, NamedTuple

from prfaas.kv.group import KVGroup, resume_step_tokens

CutReason = Literal[
    "complete",  # Everything that was requested.
    "nothing",  # No block of this prompt.
    "blocks",  # The blocks of groups that keep all tokens end there.
    "window",  # A group that looks back a limited distance has a gap further on.
    "state",  # There is no state further on.
]


class HeldBlocks(NamedTuple):
    """Blocks of one prompt that one place holds: per group a bitmap of full blocks, and one of checkpoints over `ends`."""

    blocks: tuple[int, ...]
    exact: tuple[int, ...]
    ends: Sequence[int] = ()  # Lengths in tokens, ascending.


class PrefixMatch(NamedTuple):
    """Tokens that all groups can serve, and tokens that the groups which keep all tokens can serve alone."""

    usable_tokens: int
    attention_tokens: int
    reason: CutReason


class MatchRules:
    """Conditions of a match for one model, precomputed from its KV groups."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self.attention = tuple((i, group) for i, group in enumerate(groups) if not group.is_state)
        self.full = tuple((i, group.block_tokens) for i, group in self.attention if group.keeps_all_tokens)
        self.windows = tuple((i, group) for i, group in self.attention if not group.keeps_all_tokens)
        self.states = tuple(i for i, group in enumerate(groups) if group.is_state)
        self.step = resume_step_tokens(groups)


def match_prefix(rules: MatchRules, held: HeldBlocks, limit_tokens: int) -> PrefixMatch:
    """Return the longest prefix of at most `limit_tokens` that this place can serve."""
    attention = limit_tokens
    for index, block_tokens in rules.full:
        attention = min(attention, leading_ones(held.blocks[index]) * block_tokens)
    if rules.states:
        length = _longest_with_state(rules, held, attention, limit_tokens=limit_tokens)
    else:
        length = attention - attention % rules.step
        if rules.windows:
            length = _longest_with_windows(rules, held, length)
    return PrefixMatch(length, attention, _reason(rules, length, attention, limit_tokens))


def _longest_with_state(rules: MatchRules, held: HeldBlocks, attention: int, *, limit_tokens: int) -> int:
    """Return the longest length at which each state group has its state and the others have what they need.

    Groups that keep all tokens have them up to `attention`.
    """
    states = functools.reduce(and_, [held.exact[index] for index in rules.states])
    while states:
        place = states.bit_length() - 1
        length = held.ends[place]
        if (length <= attention and not rules.windows) or (length <= limit_tokens and _serves(rules, held, place)):
            return length
        states ^= 1 << place
    return 0


def _serves(rules: MatchRules, held: HeldBlocks, place: int) -> bool:
    """Return whether every attention group has what a resumption at `held.ends[place]` looks back on."""
    length = held.ends[place]
    return all(
        _covers(group, held.blocks[index], length, ends_there=bool(held.exact[index] >> place & 1))
        for index, group in rules.attention
    )


def _covers(group: KVGroup, blocks: int, length: int, *, ends_there: bool) -> bool:
    """Return whether a group's blocks can serve `length` tokens; a partial block counts if it `ends_there`."""
    first_token = group.rules.first_token(group, length)
    if first_token >= length:
        return True
    first, full = first_token // group.block_tokens, length // group.block_tokens
    needed = full - first
    if needed > 0 and leading_ones(blocks >> first) < needed:
        return False
    return length % group.block_tokens == 0 or bool(blocks >> full & 1) or ends_there


def _longest_with_windows(rules: MatchRules, held: HeldBlocks, length: int) -> int:
    """Return the longest multiple of every block size, at most `length`, that every window group can serve."""
    ends = []
    for index, group in rules.windows:
        servable = group.rules.servable_ends(group, held.blocks[index], length // group.block_tokens)
        length = min(length, (servable.bit_length() - 1) * group.block_tokens)
        ends.append((servable, group.block_tokens))
    length -= length % rules.step
    while length and not all(bits >> length // size & 1 for bits, size in ends):
        length -= rules.step
    return length


def leading_ones(bits: int) -> int:
    """Return how many of the lowest bits are set without a gap."""
    return (bits ^ (bits + 1)).bit_length() - 1


def _reason(rules: MatchRules, length: int, attention: int, limit_tokens: int) -> CutReason:
    step = rules.step
    if length >= limit_tokens - limit_tokens % step:
        return "complete"
    if attention < step and length == 0:
        return "nothing"
    if length >= attention - attention % step:
        return "blocks"
    return "state" if rules.states else "window"

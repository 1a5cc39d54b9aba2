"""How long a prefix all KV groups of one model can serve together, from bitmaps of held blocks.

The rules, at a length of L tokens:
- full attention: every token below L lies in a held block, from the start on without a gap;
- sliding window w: the same for the tokens [L - w + 1, L) alone, which the next token looks back on;
- linear state: a checkpoint of exactly L tokens.
A block that is not full counts only for the exact length that it ends at. Without linear states only multiples of every
block size are offered, since an engine resumes at block ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import and_
from typing import Literal, NamedTuple

from prfaas.types import GroupKind

CutReason = Literal[
    "complete",  # everything that was asked for
    "nothing",  # no block of this prompt
    "blocks",  # full-attention blocks end there
    "window",  # a sliding window has a gap further on
    "state",  # no linear state further on
]


@dataclass(frozen=True)
class GroupShape:
    """What the rules need to know of one KV group."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0  # sliding_window only


class Held(NamedTuple):
    """What one place holds of one prompt, per group: full blocks as a bitmap, and checkpoints as one over `ends`."""

    blocks: tuple[int, ...]
    exact: tuple[int, ...]
    ends: Sequence[int] = ()  # lengths in tokens, ascending


class Usable(NamedTuple):
    """`usable_tokens` can be served by all groups; `attention_tokens` by the full-attention groups alone."""

    usable_tokens: int
    attention_tokens: int
    reason: CutReason


class Rules:
    """What has to hold for a prefix of one model, worked out once from the shapes of its KV groups."""

    def __init__(self, shapes: Sequence[GroupShape]) -> None:
        self.shapes = tuple(shapes)
        self.attention = tuple((i, s) for i, s in enumerate(shapes) if s.kind != "linear_state")
        self.full = tuple((i, s.block_tokens) for i, s in enumerate(shapes) if s.kind == "full_attention")
        self.windows = tuple((i, s) for i, s in enumerate(shapes) if s.kind == "sliding_window")
        self.states = tuple(i for i, s in enumerate(shapes) if s.kind == "linear_state")
        self.step = 1 if self.states else math.lcm(*(s.block_tokens for s in shapes))


def usable_prefix(rules: Rules, held: Held, limit_tokens: int) -> Usable:
    """The longest prefix of at most `limit_tokens` that this place can serve."""
    attention = limit_tokens
    for index, block_tokens in rules.full:
        attention = min(attention, leading_ones(held.blocks[index]) * block_tokens)
    if rules.states:
        length = _longest_with_state(rules, held, attention, limit_tokens=limit_tokens)
    else:
        length = attention - attention % rules.step
        if rules.windows:
            length = _longest_with_windows(rules, held, length)
    return Usable(length, attention, _reason(rules, length, attention, limit_tokens))


def _longest_with_state(rules: Rules, held: Held, attention: int, *, limit_tokens: int) -> int:
    """The longest length at which every linear group has its state and the others have what they need.

    Full attention has it up to `attention` tokens.
    """
    states = functools.reduce(and_, [held.exact[index] for index in rules.states])
    while states:
        place = states.bit_length() - 1
        length = held.ends[place]
        if (length <= attention and not rules.windows) or (length <= limit_tokens and _serves(rules, held, place)):
            return length
        states ^= 1 << place
    return 0


def _serves(rules: Rules, held: Held, place: int) -> bool:
    """Whether every attention group has what a resumption at `held.ends[place]` looks back on."""
    length = held.ends[place]
    return all(
        _covers(shape, held.blocks[index], length, ends_there=bool(held.exact[index] >> place & 1))
        for index, shape in rules.attention
    )


def _covers(shape: GroupShape, blocks: int, length: int, *, ends_there: bool) -> bool:
    """Whether a group's blocks hold it; one that is not full only where it `ends_there`."""
    first_token = max(0, length - shape.window_tokens + 1) if shape.kind == "sliding_window" else 0
    if first_token >= length:
        return True
    first, full = first_token // shape.block_tokens, length // shape.block_tokens
    needed = full - first
    if needed > 0 and leading_ones(blocks >> first) < needed:
        return False
    return length % shape.block_tokens == 0 or bool(blocks >> full & 1) or ends_there


def _longest_with_windows(rules: Rules, held: Held, length: int) -> int:
    """The longest multiple of every block size, at most `length`, whose end every window reaches back from."""
    for index, shape in rules.windows:
        if shape.window_tokens > 1:
            length = min(length, held.blocks[index].bit_length() * shape.block_tokens)
    ends = [(_window_ends(shape, held.blocks[index]), shape.block_tokens) for index, shape in rules.windows]
    length -= length % rules.step
    while length and not all(bits >> length // size & 1 for bits, size in ends):
        length -= rules.step
    return length


def _window_ends(shape: GroupShape, blocks: int) -> int:
    """Bit n is set when the window that ends with n full blocks is held."""
    needed = -(-(shape.window_tokens - 1) // shape.block_tokens)
    held = (blocks << needed) | ((1 << needed) - 1)  # blocks before the prompt count as held
    done = 1
    while done < needed:
        step = min(done, needed - done)
        held &= held >> step
        done += step
    return held if needed else -1


def leading_ones(bits: int) -> int:
    """How many of the lowest bits are set without a gap."""
    return (bits ^ (bits + 1)).bit_length() - 1


def _reason(rules: Rules, length: int, attention: int, limit_tokens: int) -> CutReason:
    step = rules.step
    if length >= limit_tokens - limit_tokens % step:
        return "complete"
    if attention < step and length == 0:
        return "nothing"
    if length >= attention - attention % step:
        return "blocks"
    return "state" if rules.states else "window"

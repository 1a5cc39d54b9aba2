"""How long a prefix all KV groups of one model can serve together, from bitmaps of held blocks.

The rules, at a length of L tokens:
- full attention: every token below L lies in a held block, from the start on without a gap;
- sliding window w: the same for the tokens [L - w + 1, L) alone, which the next token looks back on;
- linear state: a checkpoint of exactly L tokens.
A block that is not full counts only for the exact length that it ends at. Without linear states only multiples of every
block size are offered, since an engine resumes at block ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Held:
    """What one place holds of one prompt, per group: full blocks as a bitmap, lengths at which a checkpoint ends."""

    blocks: tuple[int, ...]
    exact: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Usable:
    """`usable_tokens` can be served by all groups; `attention_tokens` by the full-attention groups alone."""

    usable_tokens: int
    attention_tokens: int
    reason: CutReason


def usable_prefix(shapes: Sequence[GroupShape], held: Held, limit_tokens: int) -> Usable:
    """The longest prefix of at most `limit_tokens` that this place can serve."""
    attention = _attention_tokens(shapes, held, limit_tokens)
    if any(shape.kind == "linear_state" for shape in shapes):
        length = next((end for end in _state_lengths(shapes, held, limit_tokens) if _serves(shapes, held, end)), 0)
    else:
        length = _longest_on_grid(shapes, held, limit_tokens)
    return Usable(length, attention, _reason(shapes, length, attention, limit_tokens))


def _attention_tokens(shapes: Sequence[GroupShape], held: Held, limit_tokens: int) -> int:
    runs = [leading_ones(held.blocks[i]) * s.block_tokens for i, s in enumerate(shapes) if s.kind == "full_attention"]
    return min([limit_tokens, *runs])


def _state_lengths(shapes: Sequence[GroupShape], held: Held, limit_tokens: int) -> list[int]:
    """Lengths, longest first, at which every linear group has its state."""
    states = [held.exact[index] for index, shape in enumerate(shapes) if shape.kind == "linear_state"]
    return sorted((end for end in frozenset.intersection(*states) if end <= limit_tokens), reverse=True)


def _serves(shapes: Sequence[GroupShape], held: Held, length: int) -> bool:
    return all(
        shape.kind == "linear_state" or _covers(shape, held.blocks[index], held.exact[index], length)
        for index, shape in enumerate(shapes)
    )


def _covers(shape: GroupShape, blocks: int, exact: frozenset[int], length: int) -> bool:
    """Whether an attention group holds every token that a resumption at `length` looks back on."""
    first_token = max(0, length - shape.window_tokens + 1) if shape.kind == "sliding_window" else 0
    if first_token >= length:
        return True
    first, full = first_token // shape.block_tokens, length // shape.block_tokens
    needed = full - first
    if needed > 0 and leading_ones(blocks >> first) < needed:
        return False
    return length % shape.block_tokens == 0 or bool(blocks >> full & 1) or length in exact


def _longest_on_grid(shapes: Sequence[GroupShape], held: Held, limit_tokens: int) -> int:
    """The longest multiple of every block size at which all groups (full or windowed) have what they need."""
    step = math.lcm(*(shape.block_tokens for shape in shapes))
    reach = min([limit_tokens, *(_reach(shape, held.blocks[i], limit_tokens) for i, shape in enumerate(shapes))])
    ends = [_window_ends(shape, held.blocks[i]) for i, shape in enumerate(shapes) if shape.kind == "sliding_window"]
    sizes = [shape.block_tokens for shape in shapes if shape.kind == "sliding_window"]
    length = reach - reach % step
    while length and not all(bits >> length // size & 1 for bits, size in zip(ends, sizes, strict=True)):
        length -= step
    return length


def _reach(shape: GroupShape, blocks: int, limit_tokens: int) -> int:
    """No resumption is possible beyond this many tokens."""
    if shape.kind == "full_attention":
        return leading_ones(blocks) * shape.block_tokens
    return blocks.bit_length() * shape.block_tokens if shape.window_tokens > 1 else limit_tokens


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


def _reason(shapes: Sequence[GroupShape], length: int, attention: int, limit_tokens: int) -> CutReason:
    has_state = any(shape.kind == "linear_state" for shape in shapes)
    step = 1 if has_state else math.lcm(*(shape.block_tokens for shape in shapes))
    if length >= limit_tokens - limit_tokens % step:
        return "complete"
    if attention < step and length == 0:
        return "nothing"
    if length >= attention - attention % step:
        return "blocks"
    return "state" if has_state else "window"

"""One part of a node's pool in the index: what of it is stored and taken back, and what contradicts its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.exact_table import ExactTable
from prfaas.index.matching import Family
from prfaas.index.run_table import RunTable
from prfaas.index.segments import CELL_BLOCKS, TAIL_BYTES, Checkpoint, Digest, Holding, Segment, digest_of_hash


@dataclass(eq=False)
class Part:
    """What one holder number stands for."""

    number: int
    holding: Holding
    family: Family
    place: int  # of its bits, in what is found of its family
    is_state: bool
    block_tokens: int  # of its blocks; of a state, of those at whose ends it is marked, or 0
    runs: RunTable
    exact: ExactTable
    digest: Digest = field(default_factory=Digest)


def note_segment(bitmaps: Sequence[tuple[Part, int]], segment: Segment) -> None:
    """Store or remove blocks, and the states beside them: by part, which of the path.

    Raises:
        IndexRefusal: it contradicts a part's layout; nothing of it is noted.
    """
    _check_segment(bitmaps, segment)
    for part, bitmap in bitmaps:
        if segment.stored:
            store = part.runs.store_marks if part.is_state else part.runs.store
            added = store(part.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            part.digest = part.digest.plus(added)
        else:
            gone = part.runs.remove(part.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            part.digest = part.digest.minus(gone)


def note_checkpoint(part: Part, its: Checkpoint) -> None:
    """Store or remove what is valid at one exact length.

    Raises:
        IndexRefusal: it contradicts its part's layout.
    """
    _check_checkpoint(part, its)
    digest = digest_of_hash(its.block_hash)
    if its.stored:
        if _store(part, its):
            part.digest = part.digest.plus(digest)
    elif _remove(part, its):
        part.digest = part.digest.minus(digest)


def _store(part: Part, its: Checkpoint) -> bool:
    """Note a checkpoint, beside the block that it ends with where that is known; False when it was noted before."""
    if its.head is not None and _is_marked(part, its):
        if part.exact.holds(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens):
            return False
        tail, offset = its.block_hash[:TAIL_BYTES], _offset(part, its)
        is_new = part.runs.mark(part.number, head=its.head, offset=offset, tail=tail)
        if is_new is not None:
            return is_new
    anchor = its.anchor if part.is_state else None
    return part.exact.store(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens, anchor=anchor)


def _remove(part: Part, its: Checkpoint) -> bool:
    """Take a checkpoint back; False when it was not noted."""
    if part.exact.remove(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens):
        return True
    if its.head is None or not _is_marked(part, its):
        return False
    tail, offset = its.block_hash[:TAIL_BYTES], _offset(part, its)
    return bool(part.runs.unmark(part.number, head=its.head, offset=offset, tail=tail))


def _is_marked(part: Part, its: Checkpoint) -> bool:
    """Whether it is a state that ends with a block, beside which it can be noted."""
    return part.is_state and part.block_tokens > 0 and not its.num_tokens % part.block_tokens


def _offset(part: Part, its: Checkpoint) -> int:
    """Of the block that a state ends with, in its cell."""
    return (its.num_tokens // part.block_tokens - 1) % CELL_BLOCKS


def _check_segment(bitmaps: Sequence[tuple[Part, int]], segment: Segment) -> None:
    part, _ = bitmaps[0]
    if not part.block_tokens or not all(its.is_state for its, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{part.family.node} announces blocks of a group that has none")
    if any(its.runs is not part.runs for its, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{part.family.node} announces states beside blocks of another size")
    length, remainder = divmod(len(segment.tails), TAIL_BYTES)
    is_odd = any(bitmap >> length or bitmap < 0 for _, bitmap in bitmaps)
    if remainder or not 0 < length <= CELL_BLOCKS or is_odd:
        raise IndexRefusal(
            "malformed", f"a segment has 1 to {CELL_BLOCKS} blocks of {TAIL_BYTES} bytes, and bits for those"
        )
    if len(segment.head) != HASH_BYTES or not segment.head.startswith(segment.tails[:TAIL_BYTES]):
        raise IndexRefusal("alien_hash", "a segment's head is the hash of its first block")


def _check_checkpoint(part: Part, its: Checkpoint) -> None:
    shape = part.family.kind.rules.shapes[part.holding.group]
    if shape.kind != "linear_state" and its.num_tokens % shape.block_tokens == 0:
        raise IndexRefusal(
            "wrong_block_size", f"a partial block of {its.num_tokens} tokens in blocks of {shape.block_tokens}"
        )
    if its.num_tokens <= 0 or its.num_tokens >= 1 << 32:
        raise IndexRefusal("malformed", f"a checkpoint of {its.num_tokens} tokens")
    hashes = (its.block_hash, its.anchor, *((its.head,) if its.head is not None else ()))
    if any(len(each) != HASH_BYTES for each in hashes):
        raise IndexRefusal("alien_hash", f"a hash has {HASH_BYTES} bytes")
    if shape.kind == "linear_state" and (its.num_tokens % HASH_UNIT_TOKENS == 0) != (its.anchor == its.block_hash):
        raise IndexRefusal("alien_hash", f"the state at {its.num_tokens} tokens and its anchor contradict each other")

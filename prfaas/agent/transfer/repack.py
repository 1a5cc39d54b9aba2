"""Blocks that arrived as an engine of another tensor-parallel size cuts them: copied into the reader's own blocks.

The one copy of the payload between wire and engine, and only there. It is made in a thread, under the leases of both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.arena import Arena
from prfaas.errors import LayoutError
from prfaas.hashing import NO_HASH
from prfaas.kv import repack
from prfaas.kv.layout import Layout
from prfaas.kv.repack import Box, Move, Side, moves, whole_blocks
from prfaas.types import BlockHash, GroupBlocks

SLOTS_AT_ONCE = 64  # bounds what one gather holds beside the arenas
# Calls the first function in a thread, then the second one, with whether the first raised nothing, where the agent runs.
Background = Callable[[Callable[[], None], Callable[[bool], None]], None]


class RepackJob:
    """One transfer's way from the blocks that arrive into those that the reader gets."""

    def __init__(self, source: Placement, target: Placement) -> None:
        """What `target` held already is left out.

        Raises:
            LayoutError: the two layouts do not map.
        """
        self.target = target
        self.is_done = False
        self._source = source
        self._sides = _side(source), _side(target)
        self._moves = [(move, self._objects(move)) for move in moves(*self._sides)]
        self._is_running = False
        self._is_ended = False

    def _objects(self, move: Move) -> list[tuple[int, int]]:
        """The move's pairs as objects of source and target."""
        first = self._source.plan.run_of(move.source_rank, move.position).first_object
        into = self.target.plan.run_of(move.target_rank, move.position).first_object
        return [(first + its, into + block) for its, block in move.pairs if into + block not in self.target.held]

    def needless(self) -> frozenset[int]:
        """Objects of the source of which the target needs nothing."""
        needed = {its for _, objects in self._moves for its, _ in objects}
        return frozenset(range(len(self._source.slots))) - needed

    def begin(self, run: Background, done: Callable[[bool], None]) -> None:
        """Copy, once; `done` hears whether it worked, unless this has been ended."""
        if self._is_running or self.is_done:
            return

        def then(worked: bool) -> None:
            self._is_running, self.is_done = False, worked
            if self._is_ended:
                self.target.release()
                return
            if worked:
                self.target.publish(self._whole())
            done(worked)

        self._is_running = True
        run(self._copy, then)

    def _whole(self) -> list[int]:
        """Objects of the target that are what their hashes say."""
        found = []
        for run in self.target.plan.runs:
            whole = whole_blocks(*self._sides, run.position, num_tokens=self.target.plan.num_tokens)
            found += [run.first_object + block for block, its in enumerate(whole) if its]
        return found

    def _copy(self) -> None:
        for move, objects in self._moves:
            arenas = self._source.arenas[move.source_rank], self.target.arenas[move.target_rank]
            for start in range(0, len(objects), SLOTS_AT_ONCE):
                some = objects[start : start + SLOTS_AT_ONCE]
                slots = [self._source.slots[its] for its, _ in some], [self.target.slots[its] for _, its in some]
                _copy_slots(arenas, slots, move.boxes)

    def end(self) -> None:
        """Nobody reads the target any more; its slots are released once nothing is copied to them."""
        self._is_ended = True
        if not self._is_running:
            self.target.release()


def repacking_into(claimed: Side, arenas: tuple[Arena, ...], source: Placement, *, owner: str) -> RepackJob:
    """The way of what arrives into blocks as `claimed` has them, in room taken for them in these arenas.

    Raises:
        Refusal: one cannot be made into the other, or there is no room.
    """
    target: Placement | None = None
    try:
        _check(source.plan.layouts, claimed.layouts[0])
        plan = make_plan(claimed.layouts, claimed.groups, source.plan.num_tokens)
        target = place(source.pool, plan, arenas, owner=owner)
        if target is None:
            raise Refusal("no_memory", f"no room for {len(plan.object_bytes)} blocks cut anew")
        return RepackJob(source, target)
    except Refusal:
        raise
    except Exception as error:  # whatever another machine has described: no engine here suffers for it
        if target is not None:
            target.release()
        raise Refusal("layout_mismatch", str(error) or repr(error)) from error


def _check(theirs: Sequence[Layout], ours: Layout) -> None:
    """Raise LayoutError when blocks of some rank there cannot be made into blocks of ours."""
    found = (obstacle(its, ours) for its in theirs)
    if text := next((its for its in found if its), None):
        raise LayoutError(text)


def _side(placement: Placement) -> Side:
    return Side(placement.plan.layouts, placement.plan.groups)


def _copy_slots(arenas: tuple[Arena, Arena], slots: tuple[list[int], list[int]], boxes: Sequence[Box]) -> None:
    for box in boxes:
        shape = (*box.counts, box.item_bytes)
        source = _strided(arenas[0], box.source_offset, shape, box.source_strides)
        target = _strided(arenas[1], box.target_offset, shape, box.target_strides)
        target[slots[1]] = source[slots[0]]


def _strided(arena: Arena, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Of every slot of an arena the bytes of a box."""
    import numpy as np  # noqa: PLC0415  extra `repack`

    start = arena.header_bytes + offset
    flat = np.frombuffer(arena.memory, dtype=np.uint8)[start:]
    return np.lib.stride_tricks.as_strided(flat, (arena.num_slots, *shape), (arena.stride_bytes, *strides, 1))


def obstacle(theirs: Layout, ours: Layout) -> str | None:
    """Why blocks of `theirs` cannot be made into blocks of `ours`, or None."""
    found = repack.obstacle(theirs, ours)
    if found is None and importlib.util.find_spec("numpy") is None:
        return "this agent cuts no KV anew: it lacks numpy (pip install 'prfaas[repack]')"
    return found


def agree(one: Side, other: Side, *, num_tokens: int) -> bool:
    """Whether two engines' blocks can be of one prompt: equal where they cut it alike, else equal at common ends."""
    if [group.group for group in one.groups] != [group.group for group in other.groups]:
        return False
    return all(
        _agree(mine, theirs, [_width(side, mine) for side in (one, other)], num_tokens)
        for mine, theirs in zip(one.groups, other.groups, strict=True)
    )


def _agree(mine: GroupBlocks, theirs: GroupBlocks, widths: list[int], num_tokens: int) -> bool:
    if widths[0] == widths[1]:
        return mine == theirs
    ends, others = (_ends(its, width, num_tokens) for its, width in zip((mine, theirs), widths, strict=True))
    return all(ends[at] == others[at] for at in ends.keys() & others.keys())


def _width(side: Side, blocks: GroupBlocks) -> int:
    return side.layouts[0].groups[blocks.group].block_tokens


def _ends(blocks: GroupBlocks, width: int, num_tokens: int) -> dict[int, BlockHash]:
    """The hashes of a list of blocks by the token at which each ends."""
    ends = (min(num_tokens, (blocks.first_block + n + 1) * width) for n in range(blocks.num_blocks))
    return {end: its for end, its in zip(ends, blocks.hashes, strict=True) if its != NO_HASH}

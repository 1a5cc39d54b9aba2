"""Copies blocks that arrive in another layout into blocks of the reader's layout.

This is the only copy of the payload between wire and engine. It runs in a thread, under the leases of both placements.
"""

from collections.abc import Callable
from typing import Any

from prfaas.agent.transfer.grant_check import TransferRefused
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.arena import Arena
from prfaas.errors import LayoutError
from prfaas.hashing import NO_HASH
from prfaas.kv import repack
from prfaas.kv.repack import Move, Side, moves, whole_blocks
from prfaas.types import BlockHash, GroupBlocks

# Bounds the memory that one gather needs in addition to the arenas.
SLOTS_PER_COPY = 64
# Runs the first function in a thread, then calls the second one on the loop with whether the first succeeded.
Background = Callable[[Callable[[], None], Callable[[bool], None]], None]


class RepackJob:
    """Copy of one transfer's blocks from the layout that arrives into the layout of its reader."""

    def __init__(self, source: Placement, target: Placement) -> None:
        """Prepare the copy of all blocks that `target` does not hold.

        Raises:
            LayoutError: The two layouts do not map.
        """
        self.target = target
        self.is_done = False
        self._source = source
        self._sides = side_of(source), side_of(target)
        self._moves = [(move, self._objects(move)) for move in moves(*self._sides)]
        self._is_running = False
        self._has_ended = False

    def _objects(self, move: Move) -> list[tuple[int, int]]:
        """Return the move's pairs as objects of source and target."""
        first_source = self._source.plan.range_of(move.source_rank, move.position).first_object
        first_target = self.target.plan.range_of(move.target_rank, move.position).first_object
        pairs = ((first_source + source, first_target + target) for source, target in move.pairs)
        return [(source, target) for source, target in pairs if target not in self.target.held]

    def unneeded(self) -> frozenset[int]:
        """Return the objects of the source that the target does not need."""
        needed = {source for _, objects in self._moves for source, _ in objects}
        return frozenset(range(len(self._source.slots))) - needed

    def begin(self, run: Background, done: Callable[[bool], None]) -> None:
        """Start the copy once; `done` gets whether it succeeded, unless the job was ended."""
        if self._is_running or self.is_done:
            return

        def finish(succeeded: bool) -> None:
            self._is_running, self.is_done = False, succeeded
            if self._has_ended:
                self.target.release()
                return
            if succeeded:
                self.target.publish(self._complete_objects())
            done(succeeded)

        self._is_running = True
        run(self._copy, finish)

    def _complete_objects(self) -> list[int]:
        """Return the objects of the target that have been copied completely."""
        found = []
        for objects in self.target.plan.ranges:
            complete = whole_blocks(*self._sides, objects.position, num_tokens=self.target.plan.num_tokens)
            found += [objects.first_object + block for block, is_whole in enumerate(complete) if is_whole]
        return found

    def _copy(self) -> None:
        for move, objects in self._moves:
            source, target = self._source.arenas[move.source_rank], self.target.arenas[move.target_rank]
            for start in range(0, len(objects), SLOTS_PER_COPY):
                batch = objects[start : start + SLOTS_PER_COPY]
                source_slots = [self._source.slots[index] for index, _ in batch]
                target_slots = [self.target.slots[index] for _, index in batch]
                for box in move.boxes:
                    shape = (*box.counts, box.item_bytes)
                    from_box = _strided(source, box.source_offset, shape, box.source_strides)
                    to_box = _strided(target, box.target_offset, shape, box.target_strides)
                    to_box[target_slots] = from_box[source_slots]

    def end(self) -> None:
        """End the reader's use; the slots are released once no copy writes to them."""
        self._has_ended = True
        if not self._is_running:
            self.target.release()


def start_repack(claimed: Side, arenas: tuple[Arena, ...], source: Placement) -> RepackJob:
    """Allocate the claimed blocks in these arenas and return the job that fills them.

    Raises:
        TransferRefused: The layouts do not map, or there is no room.
    """
    target: Placement | None = None
    try:
        found = (repack.obstacle(layout, claimed.layouts[0]) for layout in source.plan.layouts)
        if obstacle := next((text for text in found if text), None):
            raise LayoutError(obstacle)
        plan = make_plan(claimed.layouts, claimed.groups, source.plan.num_tokens)
        target = place(source.pool, plan, arenas)
        if target is None:
            raise TransferRefused("no_memory", f"no room for {len(plan.object_bytes)} repacked blocks")
        return RepackJob(source, target)
    except TransferRefused:
        raise
    except Exception as error:
        # Another machine described these layouts; whatever it wrote must not harm the engines here.
        if target is not None:
            target.release()
        raise TransferRefused("layout_mismatch", str(error) or repr(error)) from error


def side_of(placement: Placement) -> Side:
    """Return layouts and blocks of a placement."""
    return Side(placement.plan.layouts, placement.plan.groups)


def _strided(arena: Arena, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the bytes of a box in every slot of an arena, as an array."""
    import numpy as np  # noqa: PLC0415  extra `repack`

    start = arena.header_bytes + offset
    flat = np.frombuffer(arena.memory, dtype=np.uint8)[start:]
    return np.lib.stride_tricks.as_strided(flat, (arena.num_slots, *shape), (arena.stride_bytes, *strides, 1))


def have_same_prompt(left: Side, right: Side, *, num_tokens: int) -> bool:
    """Return whether two engines' blocks can belong to one prompt.

    Groups of equal block size must be equal; others must agree at common block ends.
    """
    if [group.group for group in left.groups] != [group.group for group in right.groups]:
        return False
    for group, counterpart in zip(left.groups, right.groups, strict=True):
        block_tokens = [side.layouts[0].groups[group.group].block_tokens for side in (left, right)]
        if block_tokens[0] == block_tokens[1]:
            if group != counterpart:
                return False
            continue
        ends = _hashes_by_end(group, block_tokens[0], num_tokens)
        counterpart_ends = _hashes_by_end(counterpart, block_tokens[1], num_tokens)
        if any(ends[end] != counterpart_ends[end] for end in ends.keys() & counterpart_ends.keys()):
            return False
    return True


def _hashes_by_end(blocks: GroupBlocks, block_tokens: int, num_tokens: int) -> dict[int, BlockHash]:
    """Return the hashes of blocks by the token at which each block ends."""
    ends = (min(num_tokens, (blocks.first_block + n + 1) * block_tokens) for n in range(blocks.num_blocks))
    return {end: block_hash for end, block_hash in zip(ends, blocks.hashes, strict=True) if block_hash != NO_HASH}

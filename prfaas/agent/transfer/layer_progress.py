"""Which layers of a placement's blocks the workers have filled: shared by transfers that leave and blocks that stay."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.agent.engine.ring import RingEntry
from prfaas.agent.transfer.placement import Placement

Ready = Callable[[int, int, int, int], None]  # first object, number of objects, offset, length


class LayerProgress:
    """Counts a placement's layers as ring entries announce them; whole blocks become prefix blocks at once."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._layers: list[int] = [0] * len(placement.slots)  # per object a bit for each layer
        self.num_unready = len(placement.slots) - len(placement.held)
        self._ranks_done: set[int] = set()

    def layer_ready(self, rank: int, entry: RingEntry, ready: Ready | None = None) -> None:
        """A worker has filled one layer of some blocks; an entry, which another process wrote, may fit no block."""
        plan = self.placement.plan
        if entry.group >= len(plan.groups):
            return
        run = plan.run_of(rank, entry.group)
        is_within = entry.first_block + entry.num_blocks <= run.blocks.num_blocks
        if entry.layer >= len(run.group.layers) or not entry.num_blocks or not is_within:
            return
        first, piece = run.first_object + entry.first_block, run.group.layers[entry.layer]
        if ready is not None:
            ready(first, entry.num_blocks, piece.offset_bytes, piece.payload_bytes)
        whole = (1 << len(run.group.layers)) - 1
        indices = range(first, first + entry.num_blocks)
        completed = [index for index in indices if self._completes(index, 1 << entry.layer, whole)]
        self.num_unready -= len(completed)
        self.placement.publish(completed)

    def _completes(self, index: int, bit: int, whole: int) -> bool:
        """Mark a layer of a block; whether it was the last one that the block, which is not held, still lacked."""
        before = self._layers[index]
        self._layers[index] = before | bit
        return before != whole and before | bit == whole and index not in self.placement.held

    def rank_done(self, rank: int) -> bool:
        """A rank writes nothing more; whether that was the last."""
        self._ranks_done.add(rank)
        return len(self._ranks_done) == len(self.placement.plan.layouts)

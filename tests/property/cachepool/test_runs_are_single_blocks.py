"""A run that is published at once leaves the pool as its blocks do one by one."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.pool_events import BlockRemoved, BlockStored, PoolChange, PoolEvent
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, hybrid, name

NUM_TRANSFER, NUM_PREFIX = 16, 12


class Side:
    """A pool that publishes runs at once, or block by block."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.events: list[PoolEvent] = []
        ratio = NUM_TRANSFER / (NUM_TRANSFER + NUM_PREFIX)
        budget = (NUM_TRANSFER + NUM_PREFIX) * SLOT_BYTES
        self.pool = Pool(budget, transfer_ratio=ratio, on_change=self._hear)
        self.arena = self.pool.arena(hybrid())

    def _hear(self, change: PoolChange) -> None:
        self.events += change.each()

    def publish(self, hashes: list[BlockHash], parent: BlockHash, group: int, keep: bool) -> None:
        lease = self.pool.open_lease()
        run = self.pool.allocate(self.arena, 0, len(hashes), lease)
        if run is not None:
            lengths = range(32, 32 * len(hashes) + 32, 32)
            if self.at_once:
                self.pool.publish_run(self.arena, run, group=group, hashes=hashes, parent=parent, num_tokens=32)
            else:
                parents = [parent, *hashes]
                for slot, block, before, tokens in zip(run, hashes, parents, lengths, strict=False):
                    self.pool.publish(self.arena, slot, BlockIdentity(group, block, before, tokens, before))
        if not keep:
            self.pool.end_lease(lease)
        check_integrity(self.pool)

    def outcome(self) -> tuple[list[BlockStored], list[BlockRemoved], dict[str, int]]:
        stored = [event for event in self.events if isinstance(event, BlockStored)]
        removed = [event for event in self.events if isinstance(event, BlockRemoved)]
        return stored, removed, self.pool.stats().slots_by_kind


runs = st.tuples(
    st.lists(st.integers(1, 24), min_size=1, max_size=8),
    st.integers(0, 24),
    st.sampled_from([0, 0, 0, 2]),
    st.booleans(),
)


@given(st.lists(runs, max_size=8))
def test_publishing_a_run_equals_publishing_its_blocks(histories: list[tuple[list[int], int, int, bool]]) -> None:
    sides = [Side(at_once=True), Side(at_once=False)]
    try:
        for numbers, parent, group, keep in histories:
            for side in sides:
                side.publish([name(n) for n in numbers], name(parent) if parent else ROOT, group, keep)
            assert sides[0].outcome() == sides[1].outcome()
    finally:
        for side in sides:
            side.pool.close()

"""Copies of a span by one rank: all blocks but those that its agent holds."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.agent.engine.protocol import HELD
from prfaas.connector.block_map import BlockSpan
from prfaas.connector.metadata import SlotSpan


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_held_blocks_are_left_out_and_the_others_keep_block_slot_and_generation(held: list[bool]) -> None:
    slots = tuple(HELD if is_held else 50 + index for index, is_held in enumerate(held))
    blocks = tuple(range(100, 100 + len(held)))
    span = SlotSpan(BlockSpan(3, 7, blocks), ((-5,) * len(held), slots), ((0,) * len(held), tuple(range(len(held)))))
    seen = {}
    for copy in span.copies(1):
        assert copy.span.group == 3
        for offset, (block, slot, generation) in enumerate(
            zip(copy.span.block_ids, copy.slots, copy.generations, strict=True)
        ):
            seen[copy.span.first + offset] = (block, slot, generation)
    assert seen == {7 + i: (100 + i, 50 + i, i) for i, is_held in enumerate(held) if not is_held}

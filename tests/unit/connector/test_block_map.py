"""Blocks of transfers and checkpoints, compared with a token-by-token model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.connector.block_map import NULL_BLOCK, BlockMap, BlockSpan
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.match import HeldBlocks, MatchRules, match_prefix

ROOT = root_hash("m")
BLOCK = 16
FULL = KVGroup("full_attention", BLOCK)
WINDOW = KVGroup("sliding_window", BLOCK, window_tokens=40)
STATE = KVGroup("linear_state", 1 << 20)
CHECKPOINTS = KVGroup("linear_state", BLOCK, kept_states=True)


def chain(num_tokens: int) -> HashChain:
    return HashChain(ROOT, range(num_tokens))


def table(num_tokens: int) -> list[int]:
    return [100 + position for position in range(-(-num_tokens // BLOCK))]


@given(st.integers(1, 300))
def test_a_window_begins_with_the_block_that_the_next_token_reads(num_tokens: int) -> None:
    assert WINDOW.window_tokens is not None
    read = range(max(0, num_tokens - WINDOW.window_tokens + 1), num_tokens + 1)
    assert WINDOW.first_block(num_tokens) == read[0] // BLOCK


@given(st.integers(1, 300))
def test_a_transfer_lists_every_block_once_with_the_partial_one_last(num_tokens: int) -> None:
    full, window, state = BlockMap((FULL, WINDOW, STATE)).transfer_groups(chain(num_tokens), num_tokens)
    blocks = -(-num_tokens // BLOCK)
    assert (full.first_block, full.num_blocks) == (0, blocks)
    assert window.first_block + window.num_blocks == blocks
    assert full.hashes[window.first_block :] == window.hashes
    assert state.hashes == (chain(num_tokens).at(num_tokens),)
    assert window.parent == chain(num_tokens).at(window.first_block * BLOCK)


@given(st.integers(1, 300), st.lists(st.integers(1, 300), max_size=8))
def test_each_block_is_copied_once_when_it_is_final(num_tokens: int, cuts: list[int]) -> None:
    block_map = BlockMap((FULL, WINDOW, STATE))
    ends = sorted({cut for cut in cuts if cut < num_tokens} | {num_tokens})
    copied: dict[tuple[int, int], int] = {}
    saved = 0
    for end in ends:
        tables = [table(end), table(end), [7]]
        for span in block_map.filled(tables, num_tokens, saved_tokens=saved, computed_tokens=end):
            for offset in range(len(span.block_ids)):
                key = span.group, span.first + offset
                assert key not in copied
                copied[key] = end
        saved = end
    groups = block_map.transfer_groups(chain(num_tokens), num_tokens)
    assert set(copied) == {(g, j) for g, group in enumerate(groups) for j in range(group.num_blocks)}
    for (group, offset), end in copied.items():
        final = num_tokens if group == 2 else min(num_tokens, (groups[group].first_block + offset + 1) * BLOCK)
        assert end >= final


def test_local_blocks_are_copied_in_the_first_step() -> None:
    (span,) = BlockMap((FULL,)).filled([table(70)], 100, saved_tokens=0, computed_tokens=70)
    assert span == BlockSpan(0, 0, (100, 101, 102, 103))


def test_null_blocks_are_left_out() -> None:
    tables = [[NULL_BLOCK, 5, NULL_BLOCK, 6, 7]]
    spans = BlockMap((FULL,)).filled(tables, 80, saved_tokens=0, computed_tokens=80)
    assert spans == (BlockSpan(0, 1, (5,)), BlockSpan(0, 3, (6, 7)))


def test_a_state_is_found_at_its_entry() -> None:
    assert [STATE.state_entry(num_tokens) for num_tokens in (1, 100, 1000)] == [0, 0, 0]
    assert [CHECKPOINTS.state_entry(num_tokens) for num_tokens in (1, 16, 17, 32)] == [0, 0, 1, 1]
    (span,) = BlockMap((CHECKPOINTS,)).filled([[NULL_BLOCK, 9]], 20, saved_tokens=16, computed_tokens=20)
    assert span == BlockSpan(0, 0, (9,))


@given(st.integers(1, 300), st.integers(0, 18))
def test_only_missing_blocks_are_loaded_but_always_the_state(num_tokens: int, held_blocks: int) -> None:
    held_blocks = min(held_blocks, (num_tokens - 1) // BLOCK)
    tables, local = [table(num_tokens), [7]], held_blocks * BLOCK
    spans = BlockMap((FULL, STATE)).filled(tables, num_tokens, saved_tokens=local, computed_tokens=num_tokens)
    loaded = [block for span in spans if span.group == 0 for block in span.block_ids]
    assert loaded == table(num_tokens)[held_blocks:]
    assert spans[-1] == BlockSpan(1, 0, (7,))


def test_a_partial_last_block_is_named_only_beside_states() -> None:
    with_state = BlockMap((FULL, STATE)).transfer_groups(chain(20), 20)
    without = BlockMap((FULL, WINDOW)).transfer_groups(chain(20), 20)
    assert with_state[0].hashes[-1] == chain(20).at(20)
    assert not any(without[0].hashes[-1])


# Checkpoints

HYBRID = BlockMap((FULL, WINDOW, CHECKPOINTS))


@given(st.integers(1, 20))
def test_a_checkpoint_and_earlier_full_blocks_equal_a_transfer_of_its_length(num_blocks: int) -> None:
    boundary = num_blocks * BLOCK
    whole = HYBRID.transfer_groups(chain(boundary), boundary)
    full, window, state = HYBRID.checkpoint_groups(chain(boundary + 7), boundary)
    assert (full.hashes, full.parent) == ((), ROOT), "full attention is left at the request's end"
    assert (window, state) == whole[1:]
    tables = [table(boundary), table(boundary), table(boundary)]
    spans = HYBRID.checkpoint(tables, boundary, {})
    assert spans is not None
    assert [(span.group, span.first, len(span.block_ids)) for span in spans] == [(1, 0, window.num_blocks), (2, 0, 1)]
    assert {span.block_ids[-1] for span in spans} == {table(boundary)[-1]}


def test_a_checkpoint_that_lacks_a_block_is_none() -> None:
    ends = table(64)
    gone = [*ends[:2], NULL_BLOCK, ends[3]]  # The window at 64 reads blocks 1 to 3.
    assert HYBRID.checkpoint([ends, ends, ends], 64, {}) is not None
    assert HYBRID.checkpoint([ends, gone, ends], 64, {}) is None
    assert HYBRID.checkpoint([ends, ends, [*ends[:3], NULL_BLOCK]], 64, {}) is None
    assert HYBRID.checkpoint([ends, ends, ends[:3]], 64, {}) is None


def test_a_state_that_the_engine_hands_over_is_taken_instead_of_the_one_in_its_table() -> None:
    spans = HYBRID.checkpoint([table(64)] * 3, 64, {2: 7})
    assert spans is not None and spans[-1] == BlockSpan(2, 0, (7,))
    assert BlockMap((CHECKPOINTS, CHECKPOINTS)).checkpoint([table(64)] * 2, 64, {0: 7}) is None, "one of two"


@pytest.mark.parametrize(
    ("groups", "before", "computed", "boundary"),
    [
        ((FULL, CHECKPOINTS), 0, 48, 48),
        ((FULL, CHECKPOINTS), 0, 50, None),  # The state is valid after 50 tokens.
        ((FULL, WINDOW), 0, 50, 48),
        ((FULL, WINDOW), 48, 50, None),
        ((FULL, WINDOW), 0, 15, None),
        ((KVGroup("full_attention", 32), CHECKPOINTS), 0, 48, None),  # Inside a block of attention.
    ],
)
def test_a_step_reaches_a_boundary_with_its_last_state_or_with_any_windows(
    groups: tuple[KVGroup, ...], before: int, computed: int, boundary: int | None
) -> None:
    assert BlockMap(groups).boundary(before, computed) == boundary


@pytest.mark.parametrize(
    ("groups", "spacing"),
    [
        ((FULL,), 0),
        ((FULL, STATE), 0),  # The next step overwrites the state.
        ((FULL, CHECKPOINTS), 16),
        ((FULL, CHECKPOINTS, CHECKPOINTS, CHECKPOINTS), 48),
        ((FULL, FULL, CHECKPOINTS, CHECKPOINTS, CHECKPOINTS), 32),
        ((FULL, WINDOW), 48),  # A window of 40 tokens takes three blocks.
        ((FULL, WINDOW, CHECKPOINTS), 64),
        ((WINDOW,), 48),
        ((KVGroup("full_attention", 32), CHECKPOINTS), 32),
    ],
)
def test_checkpoints_take_no_more_blocks_than_the_full_attention_between_them(
    groups: tuple[KVGroup, ...], spacing: int
) -> None:
    assert BlockMap(groups).checkpoint_spacing_tokens == spacing


@pytest.mark.parametrize("full_block", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_what_travels_serves_a_later_turn_up_to_the_last_common_block_end(full_block: int) -> None:
    groups = (KVGroup("full_attention", full_block), KVGroup("sliding_window", BLOCK, window_tokens=5 * BLOCK + 3))
    for num_tokens in range(1, 20 * full_block):
        held = []
        for blocks, group in zip(BlockMap(groups).transfer_groups(chain(num_tokens), num_tokens), groups, strict=True):
            num_full = num_tokens // group.block_tokens - blocks.first_block
            held.append((1 << num_full) - 1 << blocks.first_block)
        match = match_prefix(MatchRules(groups), HeldBlocks(tuple(held), (0, 0)), num_tokens)
        assert match.usable_tokens == num_tokens // full_block * full_block, num_tokens

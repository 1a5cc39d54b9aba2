"""Steps of the prefill worker: which tokens, into which blocks."""

import pytest

from prfaas.colocate.prefill_plan import GroupShape, Order, PrefillQueue, has_context, num_scratch_blocks

FULL = GroupShape(4)
WINDOW = GroupShape(4, window_tokens=6)
STATE = GroupShape(4, is_state=True)


def order(name: str, start: int, end: int, *tables: tuple[int, ...]) -> Order:
    return Order(name, tuple(range(end + 1)), start, end, tables)


def queue(*groups: GroupShape, chunk_tokens: int = 8, max_rows: int = 4) -> PrefillQueue:
    number = num_scratch_blocks(groups, chunk_tokens)
    return PrefillQueue(groups, chunk_tokens, max_rows, tuple(range(100, 100 + number)))


def test_short_prompts_share_a_step_and_a_long_one_is_cut_where_the_step_is_full() -> None:
    orders = queue(FULL)
    orders.add(order("a", 0, 3, (1,)))
    orders.add(order("b", 4, 16, (2, 3, 4, 5)))
    first, second = orders.next_step(), orders.next_step()
    assert [(chunk.order.request_id, chunk.start, chunk.end) for chunk in first] == [("a", 0, 3), ("b", 4, 9)]
    assert [(chunk.start, chunk.end, chunk.is_last) for chunk in second] == [(9, 16, True)]
    assert not orders


def test_a_cached_beginning_is_context_only_within_the_window_of_the_end() -> None:
    assert has_context((FULL, WINDOW), 0, 40)
    assert has_context((FULL, WINDOW), 2, 5)
    assert not has_context((FULL, WINDOW), 4, 40)
    assert has_context((FULL, STATE), 4, 40)


def test_a_prompt_does_not_wait_for_a_long_one_in_the_same_step() -> None:
    orders = queue(FULL, chunk_tokens=512)
    orders.add(order("a", 0, 100, tuple(range(1, 26))))
    orders.add(order("b", 0, 400, tuple(range(26, 126))))
    steps = [[(chunk.order.request_id, chunk.end) for chunk in orders.next_step()] for _ in range(2)]
    assert steps == [[("a", 100), ("b", 28)], [("b", 400)]]


def test_shorter_prompts_overtake_a_long_one_until_it_has_waited_long_enough() -> None:
    orders = queue(FULL)
    orders.add(order("long", 0, 20, (1, 2, 3, 4, 5)))
    finished: list[str] = []
    while "long" not in finished:
        orders.add(order(f"short {len(finished)}", 0, 8, (6, 7)))
        finished += [chunk.order.request_id for chunk in orders.next_step() if chunk.is_last]
    # The long one has 12 tokens more, so it waits for four times as many: six short ones.
    assert finished == [f"short {number}" for number in range(6)] + ["long"]


@pytest.mark.parametrize("group", [WINDOW, STATE])
def test_a_prompt_with_scratch_blocks_is_finished_before_a_shorter_one(group: GroupShape) -> None:
    orders = queue(group)
    orders.add(order("long", 0, 20, (0, 0, 0, 4, 5)))
    orders.next_step()
    orders.add(order("short", 0, 4, (6,)))
    names = []
    while orders:
        names += [chunk.order.request_id for chunk in orders.next_step() if chunk.is_last]
    assert names == ["long", "short"]


def test_only_the_first_step_zeroes_the_blocks_that_hold_nothing_yet() -> None:
    orders = queue(FULL)
    orders.add(order("b", 4, 16, (2, 3, 4, 5)))
    assert [chunk.new_blocks for chunk in orders.next_step()] == [[3, 4, 5]]
    assert [chunk.new_blocks for chunk in orders.next_step()] == [[]]


@pytest.mark.parametrize("length", [9, 17, 40])
def test_a_window_reads_every_block_within_reach_and_scratch_is_enough(length: int) -> None:
    blocks = -(-length // 4)
    kept = (length - 6) // 4  # Decode needs blocks from here on.
    table = (*[0] * kept, *range(1, blocks - kept + 1))
    orders = queue(WINDOW)
    orders.add(order("w", 0, length, table))
    written: dict[int, int] = {}  # Block by token, as the steps so far have written.
    while orders:
        (chunk,) = orders.next_step()
        (used,) = chunk.tables
        for token in range(max(0, chunk.start - 6), chunk.start):
            assert used[token // 4] == written[token], "an earlier chunk wrote this token elsewhere"
        for token in range(chunk.start, chunk.end):
            written[token] = used[token // 4]
            assert written[token] != 0
        alive = {used[token // 4] for token in range(max(0, chunk.start - 6), chunk.end)}
        assert len(alive) == chunk_blocks(max(0, chunk.start - 6), chunk.end), "two entries share a block"
    assert [written[token] for token in range(max(0, length - 6) // 4 * 4 + 4, length)] == [
        table[token // 4] for token in range(max(0, length - 6) // 4 * 4 + 4, length)
    ]


def chunk_blocks(start: int, end: int) -> int:
    return (end - 1) // 4 - start // 4 + 1


def test_a_state_goes_from_chunk_to_chunk_and_ends_in_the_block_of_decode() -> None:
    orders = queue(STATE, chunk_tokens=6)
    orders.add(order("s", 0, 14, (0, 0, 0, 7)))
    ends = []
    source = None
    while orders:
        (chunk,) = orders.next_step()
        (table,) = chunk.tables
        if source is not None:
            assert table[(chunk.start - 1) // 4] == source
        source = table[(chunk.end - 1) // 4]
        assert source != 0
        ends.append(source)
    assert ends[-1] == 7 and 7 not in ends[:-1]


def test_a_cancelled_order_is_computed_no_further() -> None:
    orders = queue(FULL)
    orders.add(order("a", 0, 20, (1, 2, 3, 4, 5)))
    orders.next_step()
    orders.cancel("a")
    assert not orders and orders.next_step() == []

"""Blocks and states of requests in the decode process."""

from __future__ import annotations

from prfaas.colocate.decode.request_table import DecodeBook, Sequence
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Request

SHAPE = CacheShape(num_blocks=9, block_tokens=4, num_state_slots=4)


def request(number: int, num_tokens: int, max_tokens: int = 3) -> Request:
    return Request(number, 0, max_tokens, NO_STOP_TOKEN, tuple(range(num_tokens)))


def running(book: DecodeBook, number: int, num_tokens: int = 4, max_tokens: int = 3) -> Sequence:
    book.add(request(number, num_tokens, max_tokens))
    (sequence,) = book.admit()
    book.prefilled(number, 7)
    assert book.join() == [sequence]
    return sequence


def test_blocks_are_given_in_the_order_of_arrival_and_nobody_overtakes() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    book.add(request(1, 16))
    book.add(request(2, 30))  # 8 blocks: more than are left
    book.add(request(3, 4))
    assert [sequence.id for sequence in book.admit()] == [1]
    assert book.admit() == []


def test_blocks_of_an_ended_request_are_free_only_when_the_step_under_way_is_collected() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    sequence = running(book, 1)
    free = book.num_free_blocks
    assert book.generated(sequence, 8, step_under_way=2) and book.generated(sequence, 9, step_under_way=2)
    book.collected(1)
    assert book.num_free_blocks == free
    book.collected(2)
    assert book.num_free_blocks == SHAPE.num_blocks - 1 and book.is_idle()


def test_a_token_after_the_end_is_surplus() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    sequence = running(book, 1)
    book.generated(sequence, 8, step_under_way=1)
    book.generated(sequence, 9, step_under_way=1)
    assert not book.generated(sequence, 10, step_under_way=1)


def test_the_block_of_the_next_token_is_reserved_at_a_block_border() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    sequence = running(book, 1, num_tokens=4)
    assert len(sequence.blocks) == 1
    assert book.reserve(sequence) and len(sequence.blocks) == 2


def test_a_cancelled_request_keeps_its_blocks_until_prefill_has_answered() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    for number in (1, 2):
        book.add(request(number, 4))
    book.admit()
    assert book.cancel(1, step_under_way=0) and book.cancel(2, step_under_way=0)
    assert book.num_free_blocks == SHAPE.num_blocks - 3
    book.dropped(1)
    book.prefilled(2, 5)  # The DROP came too late.
    assert book.num_free_blocks == SHAPE.num_blocks - 1 and book.is_idle()


def test_a_preempted_request_comes_back_with_what_it_generated_before_later_ones() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    sequence = running(book, 1, max_tokens=9)
    book.add(request(2, 24))  # Waits: too large beside the first.
    again = book.preempt(sequence)
    assert again == Request(1, 1, 9, NO_STOP_TOKEN, (0, 1, 2, 3, 7))
    assert [s.id for s in book.admit()] == [1]


def test_a_prompt_whose_first_token_is_its_last_never_runs() -> None:
    book = DecodeBook(SHAPE, max_rows=4)
    book.add(request(1, 4, max_tokens=1))
    book.admit()
    book.prefilled(1, 7)
    assert book.join() == [] and book.is_idle()

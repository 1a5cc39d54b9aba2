"""What a record learns of a streamed answer."""

from __future__ import annotations

from prfaas.router.record import Record

EVENT = b'data: {"choices": []}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(*chunks: bytes) -> Record:
    record = Record("r")
    for chunk in chunks:
        record.streamed(chunk)
    return record


def test_the_time_between_events_is_the_whole_over_one_less_than_their_number() -> None:
    once, thrice = streamed(EVENT, EVENT + DONE), streamed(EVENT, 3 * EVENT)
    assert once.tpot_seconds == once._last_at - once._first_at > 0
    assert thrice.tpot_seconds == (thrice._last_at - thrice._first_at) / 3 > 0


def test_an_answer_of_one_event_or_of_one_piece_has_no_time_between() -> None:
    assert streamed(EVENT, DONE).tpot_seconds == 0
    assert streamed(EVENT * 5 + DONE).tpot_seconds == 0
    assert Record("r").tpot_seconds == 0

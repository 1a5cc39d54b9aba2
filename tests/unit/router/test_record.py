"""What a record learns of a streamed answer."""

from __future__ import annotations

import pytest

from prfaas.router.routing.record import RequestRecord

EVENT = b'data: {"choices": []}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(*chunks: bytes) -> RequestRecord:
    record = RequestRecord("r")
    for chunk in chunks:
        record.streamed(chunk)
    return record


@pytest.mark.parametrize("end", [(USAGE + DONE,), (USAGE, DONE), (USAGE[:40], USAGE[40:], DONE)])
def test_the_time_between_tokens_is_the_whole_over_one_less_than_the_usage_says(end: tuple[bytes, ...]) -> None:
    record = streamed(EVENT, EVENT * 9, *end)
    assert record.is_streamed
    assert record.tpot_seconds == (record._last_at - record._first_at) / 4 > 0


def test_without_usage_or_in_one_piece_there_is_none() -> None:
    assert streamed(EVENT, EVENT, DONE).tpot_seconds == 0
    whole = streamed(EVENT * 5 + USAGE + DONE)
    assert (whole.tpot_seconds, whole.is_streamed) == (0, False)
    assert (RequestRecord("r").tpot_seconds, RequestRecord("r").is_streamed) == (0, False)


@pytest.mark.parametrize(
    ("pieces", "num_tokens"),
    [
        ([b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}'], 14),
        ([b'{"usage": {"prompt_tokens": 9, "completion_tokens": 5}, "x": [' + b"1," * 9999, b"1]}"], 14),
        ([b'{"usage": {"prompt_tokens": 9, "completion_tokens": 5', b'0, "total_tokens": 59}}'], 59),
        ([rb'{"content": "\"completion_tokens\": 1", "usage": {"prompt_tokens": 9, "completion_tokens": 5}}'], 14),
        ([USAGE, rb'data: {"content": "\"prompt_tokens\": 1, \"completion_tokens\": 1"}'], 14),
        ([b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', USAGE, b"data: [DONE]\n\n"], 14),
        ([b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', b'data: {"a": 3}\n\ndata: [DONE]\n\n'], 100 + 3),
        ([], 0),
    ],
)
def test_a_clients_tokens_are_those_of_the_usage_else_estimated_and_one_an_event(
    pieces: list[bytes], num_tokens: int
) -> None:
    record = RequestRecord("r")
    if pieces:
        record.answered(200)
    for piece in pieces:
        record.streamed(piece)
    assert record.num_tokens(100) == num_tokens

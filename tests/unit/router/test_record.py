"""Token times and token counts that a record takes from a streamed answer."""

import pytest

from prfaas.router.routing.record import RequestRecord

EVENT = b'data: {"choices": []}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(*chunks: bytes) -> RequestRecord:
    record = RequestRecord("r")
    for chunk in chunks:
        record.note_chunk(chunk)
    return record


@pytest.mark.parametrize("end", [(USAGE + DONE,), (USAGE, DONE), (USAGE[:40], USAGE[40:], DONE)])
def test_tpot_is_the_streaming_time_divided_by_the_tokens_of_the_usage_but_one(end: tuple[bytes, ...]) -> None:
    record = streamed(EVENT, EVENT * 9, *end)
    assert record.is_streamed
    assert record.tpot_seconds == (record._last_at - record._first_at) / 4 > 0


def test_answer_without_usage_or_in_one_chunk_has_no_tpot() -> None:
    assert streamed(EVENT, EVENT, DONE).tpot_seconds == 0
    whole = streamed(EVENT * 5 + USAGE + DONE)
    assert (whole.tpot_seconds, whole.is_streamed) == (0, False)
    assert (RequestRecord("r").tpot_seconds, RequestRecord("r").is_streamed) == (0, False)


@pytest.mark.parametrize(
    ("chunks", "num_tokens"),
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
def test_tokens_come_from_the_usage_or_else_from_the_estimate_and_the_events(
    chunks: list[bytes], num_tokens: int
) -> None:
    record = RequestRecord("r", estimated_prompt_tokens=100)
    if chunks:
        record.note_answer(200)
    for chunk in chunks:
        record.note_chunk(chunk)
    assert record.num_tokens == num_tokens

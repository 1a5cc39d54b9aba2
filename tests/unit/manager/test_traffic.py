"""Output lengths that a plan assumes, and memory of reported requests."""

from collections import deque

import pytest

from prfaas.manager.state.traffic import MAX_OUTPUT_TOKENS, RequestSample, Traffic, likely_output_tokens

HIGHEST = 2**32 - 1  # The highest limit of a request.


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([200, 400, 300, HIGHEST], 350.0),
        ([0, 0, 500], 500.0),
        ([HIGHEST, HIGHEST, 10], MAX_OUTPUT_TOKENS),
        ([0, 0], None),
        ([], None),
    ],
)
def test_few_absurd_limits_do_not_count(limits: list[int], expected: float | None) -> None:
    assert likely_output_tokens(RequestSample(0.0, 100, 0, limit) for limit in limits) == expected


def test_reports_take_no_more_memory_after_the_window() -> None:
    traffic = Traffic(window_seconds=100.0)
    sizes = []
    for second in range(10_000):
        traffic.note_reports(1, float(second))
        sizes.append(sum(map(len, (value for value in vars(traffic).values() if isinstance(value, deque)))))
    assert max(sizes) <= 101

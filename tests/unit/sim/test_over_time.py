"""Who is where over the time of a run."""

from __future__ import annotations

import pytest

from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.summary import NUM_BINS, requests_over_time


def request(*moments: float) -> SimulatedRequest:
    made = SimulatedRequest(0, moments[0], num_prompt_tokens=1, num_output_tokens=1)
    made.prefill_start, made.prefill_end, made.transfer_end, made.decode_start, made.decode_end = moments[1:]
    return made


def test_each_stage_counts_its_requests() -> None:
    both = [request(0, 10, 20, 30, 30, 100), request(0, 20, 40, 40, 40, 80)]
    found = requests_over_time(both, 100.0)
    bins = [5, 15, 25, 35, 50, 90]
    assert [[round(found[stage][moment], 9) for moment in bins] for stage in found] == [
        [2, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 2, 1],
    ]


def test_time_spent_in_a_stage_adds_up() -> None:
    requests = [request(0.3, 1.7, 2.9, 3.1, 4.4, 9.99), request(2.2, 2.21, 7.3, 7.35, 7.4, 8.8)]
    decode = requests_over_time(requests, 10.0)["decode"]
    assert sum(decode) * 10.0 / NUM_BINS == pytest.approx(9.99 - 4.4 + 8.8 - 7.4)

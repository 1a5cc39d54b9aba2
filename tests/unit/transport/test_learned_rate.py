"""A limit is learned from lasting losses, probed upwards slowly, and forgotten where the way has become wide."""

from __future__ import annotations

from math import inf

from prfaas.transport.congestion.rate_budget import FORGET_RATIO, OVERFLOW_WINDOWS, PATIENT_WINDOWS, LearnedRateLimit


class Clock:
    """Feeds a rate a sample every twentieth of a second."""

    def __init__(self) -> None:
        self.rate = LearnedRateLimit()
        self._now = 0.0

    def run(self, seconds: float, *, carried: float, lost: float) -> float:
        for _ in range(int(20 * seconds) + 1):
            self.rate.observe(self._now, carried=carried, lost=lost)
            self._now += 0.05
        return self.rate.bytes_per_second

    def pause(self, seconds: float) -> None:
        self._now += seconds


def test_there_is_no_limit_without_losses() -> None:
    assert Clock().run(60, carried=1e9, lost=0.01e9) == inf


def test_a_short_burst_of_losses_sets_no_limit() -> None:
    clock = Clock()
    for _ in range(5):
        assert clock.run(OVERFLOW_WINDOWS - 1.5, carried=1e9, lost=0.2e9) == inf
        assert clock.run(2, carried=1e9, lost=0.0) == inf


def test_lasting_losses_set_the_limit_to_what_arrives() -> None:
    limit = Clock().run(OVERFLOW_WINDOWS + 0.5, carried=1e9, lost=0.2e9)
    assert 0.99e9 < limit < 1.01e9


def test_losses_at_a_limit_lower_it() -> None:
    clock = Clock()
    clock.run(OVERFLOW_WINDOWS + 0.5, carried=1e9, lost=0.2e9)
    limit = clock.run(OVERFLOW_WINDOWS + 0.5, carried=0.5e9, lost=0.1e9)
    assert 0.49e9 < limit < 0.51e9


def test_a_limit_rises_slowly_at_first_and_is_gone_when_nothing_is_lost_at_four_times_as_much() -> None:
    clock = Clock()
    learned = clock.run(OVERFLOW_WINDOWS + 0.5, carried=1e9, lost=0.2e9)
    assert learned < clock.run(PATIENT_WINDOWS - 1, carried=1e9, lost=0.0) < 1.15 * learned
    assert 1.15 * learned < clock.run(4, carried=1e9, lost=0.0) < FORGET_RATIO * learned
    assert clock.run(10, carried=1e9, lost=0.0) == inf


def test_an_idle_while_belongs_to_no_window() -> None:
    clock = Clock()
    for _ in range(20):
        clock.run(0.5, carried=1e9, lost=0.2e9)
        clock.pause(30)
    assert clock.rate.bytes_per_second == inf

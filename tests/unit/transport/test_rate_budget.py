"""Rate budgets: fair shares by use, and limits learned from lasting losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.congestion.rate_budget import (
    FORGET_RATIO,
    OVERFLOW_WINDOWS,
    PATIENT_WINDOWS,
    SLOW_SECONDS,
    UNUSED_RATIO,
    LearnedRateLimit,
    LinkUsage,
    RateBudget,
    fair_shares,
)

TICKS_PER_SECOND = 20

# Shares


@given(st.lists(st.floats(0, 1e10), min_size=1, max_size=8), st.integers(0, 2))
def test_shares_are_max_min_fair(limited: list[float], num_unlimited: int) -> None:
    demands = dict(enumerate([*limited, *[inf] * num_unlimited]))
    shares = fair_shares(1e9, demands)
    assert abs(sum(shares.values()) - min(1e9, sum(demands.values()))) < 1
    for name, demand in demands.items():
        assert shares[name] <= demand
        for smaller_name, smaller_demand in demands.items():
            if demand > smaller_demand:
                assert shares[name] >= shares[smaller_name] - 1


def test_small_demand_leaves_the_rest_to_the_others() -> None:
    assert fair_shares(9.0, {"slow": 1.0, "a": inf, "b": inf}) == {"slow": 1.0, "a": 4.0, "b": 4.0}


@dataclass
class Sender:
    """Link that carries its rate, or its share if that is less."""

    name: str
    rate: float = inf
    lost: float = 0.0
    is_full: bool = True
    share: float = 0.0
    delivered: float = 0.0
    resent: float = 0.0

    def tick(self, budget: RateBudget, now: float) -> None:
        carried = min(self.rate, self.share or inf)
        if carried < inf:
            self.delivered += carried / TICKS_PER_SECOND
        self.resent += self.lost / TICKS_PER_SECOND
        usage = LinkUsage(True, self.is_full, int(self.delivered), int(self.resent))
        self.share = budget.share(self.name, usage, now=now)


def _run(budget: RateBudget, senders: Iterable[Sender], *, seconds: float, began: float = 0.0) -> None:
    for tick in range(round(TICKS_PER_SECOND * seconds)):
        for sender in senders:
            sender.tick(budget, began + tick / TICKS_PER_SECOND)


def test_idle_and_closed_links_take_no_share() -> None:
    budget, busy, idle = RateBudget(12e6), LinkUsage(True, True, 0, 0), LinkUsage(False, False, 0, 0)
    assert budget.share("a", busy, now=0.0) == 12e6
    assert budget.share("b", idle, now=0.0) == 6e6
    assert budget.share("a", busy, now=0.0) == 12e6
    assert budget.share("b", busy, now=0.0) == 6e6
    assert budget.share("a", busy, now=0.0) == 6e6
    budget.forget("a")
    assert budget.share("b", busy, now=0.0) == 12e6


def test_unused_shares_go_to_the_link_that_can_use_them() -> None:
    budget, bulk = RateBudget(100e6), Sender("bulk")
    layers = [Sender(f"layers {number}", rate=3e6, is_full=False) for number in range(5)]
    _run(budget, [bulk, *layers], seconds=2)
    assert bulk.share == pytest.approx(100e6 - 5 * 3e6 / UNUSED_RATIO, rel=0.01)
    # A layer leaves at an equal share when it comes, not at the mean rate of the layers.
    assert [layer.share for layer in layers] == pytest.approx([100e6 / 6] * 5)


def test_full_link_that_stays_slow_loses_its_equal_share() -> None:
    budget, bulk, slow = RateBudget(100e6), Sender("bulk"), Sender("slow", rate=10e6)
    _run(budget, [bulk, slow], seconds=SLOW_SECONDS - 0.1)
    assert bulk.share == slow.share == 50e6
    _run(budget, [bulk, slow], seconds=2, began=SLOW_SECONDS - 0.1)
    assert bulk.share == pytest.approx(100e6 - 10e6 / UNUSED_RATIO, rel=0.01)
    slow.rate = inf
    _run(budget, [bulk, slow], seconds=2, began=SLOW_SECONDS + 1.9)
    assert bulk.share == slow.share == 50e6


def test_budget_to_be_learned_has_no_limit_without_lasting_losses() -> None:
    senders = [Sender(name, rate=50e6, lost=1e6) for name in "ab"]
    _run(RateBudget(0.0), senders, seconds=30)
    assert [sender.share for sender in senders] == [0.0, 0.0]


def test_budget_learns_what_arrives_over_all_busy_links() -> None:
    budget, bulk = RateBudget(0.0), Sender("bulk", rate=61e6, lost=6e6)
    layers = [Sender(f"layers {number}", rate=13e6, is_full=False) for number in range(3)]
    _run(budget, [bulk, *layers], seconds=2)
    assert budget.bytes_per_second == inf
    _run(budget, [bulk, *layers], seconds=1.2, began=2.0)
    assert budget.bytes_per_second == pytest.approx(100e6, rel=0.02)
    assert bulk.share == pytest.approx(100e6 - 3 * 13e6 / UNUSED_RATIO, rel=0.02)


# Learned limits


class _Path:
    """Path that feeds its learned limit a sample every twentieth of a second."""

    def __init__(self) -> None:
        self.limit = LearnedRateLimit()
        self._now = 0.0

    def run(self, seconds: float, *, carried: float, lost: float) -> float:
        for _ in range(int(20 * seconds) + 1):
            self.limit.observe(self._now, carried=carried, lost=lost)
            self._now += 0.05
        return self.limit.bytes_per_second

    def pause(self, seconds: float) -> None:
        self._now += seconds


def test_random_loss_sets_no_limit() -> None:
    assert _Path().run(60, carried=1e9, lost=0.01e9) == inf


def test_short_bursts_of_loss_set_no_limit() -> None:
    path = _Path()
    for _ in range(5):
        assert path.run(OVERFLOW_WINDOWS - 1.5, carried=1e9, lost=0.2e9) == inf
        assert path.run(2, carried=1e9, lost=0.0) == inf


def test_lasting_loss_sets_the_limit_to_what_arrives_and_lowers_it_again() -> None:
    path = _Path()
    assert 0.99e9 < path.run(OVERFLOW_WINDOWS + 0.5, carried=1e9, lost=0.2e9) < 1.01e9
    assert 0.49e9 < path.run(OVERFLOW_WINDOWS + 0.5, carried=0.5e9, lost=0.1e9) < 0.51e9


def test_limit_rises_ever_faster_without_loss_and_is_dropped_at_four_times_the_learned_rate() -> None:
    path = _Path()
    learned = path.run(OVERFLOW_WINDOWS + 0.5, carried=1e9, lost=0.2e9)
    assert learned < path.run(PATIENT_WINDOWS - 1, carried=1e9, lost=0.0) < 1.15 * learned
    assert 1.15 * learned < path.run(4, carried=1e9, lost=0.0) < FORGET_RATIO * learned
    assert path.run(10, carried=1e9, lost=0.0) == inf


def test_idle_time_belongs_to_no_window() -> None:
    path = _Path()
    for _ in range(20):
        path.run(0.5, carried=1e9, lost=0.2e9)
        path.pause(30)
    assert path.limit.bytes_per_second == inf

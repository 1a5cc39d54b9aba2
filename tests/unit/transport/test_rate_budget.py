"""Rate budgets: fair shares by use."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.congestion.rate_budget import SLOW_SECONDS, UNUSED_RATIO, LinkUsage, RateBudget, fair_shares

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
    is_full: bool = True
    share: float = 0.0
    delivered: float = 0.0

    def tick(self, budget: RateBudget, now: float) -> None:
        carried = min(self.rate, self.share or inf)
        if carried < inf:
            self.delivered += carried / TICKS_PER_SECOND
        usage = LinkUsage(True, self.is_full, int(self.delivered))
        self.share = budget.share(self.name, usage, now=now)


def _run(budget: RateBudget, senders: Iterable[Sender], *, seconds: float, began: float = 0.0) -> None:
    for tick in range(round(TICKS_PER_SECOND * seconds)):
        for sender in senders:
            sender.tick(budget, began + tick / TICKS_PER_SECOND)


def test_idle_and_closed_links_take_no_share() -> None:
    budget, busy, idle = RateBudget(12e6), LinkUsage(True, True, 0), LinkUsage(False, False, 0)
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

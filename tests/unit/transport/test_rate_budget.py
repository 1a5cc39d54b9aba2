"""A budget is shared by who sends, by what each can use, and never exceeded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.congestion.rate_budget import SLOW_SECONDS, UNUSED_RATIO, LinkUsage, RateBudget, fair_shares

ALL = float("inf")
TICKS_PER_SECOND = 20


@given(st.lists(st.floats(0, 1e10), min_size=1, max_size=8), st.integers(0, 2))
def test_shares_add_up_to_what_is_wanted_or_the_budget_and_nobody_who_wants_more_gets_less(
    some: list[float], num_all: int
) -> None:
    demands = dict(enumerate([*some, *[ALL] * num_all]))
    shares = fair_shares(1e9, demands)
    assert abs(sum(shares.values()) - min(1e9, sum(demands.values()))) < 1
    for demand in demands:
        assert shares[demand] <= demands[demand]
        for other in demands:
            if demands[demand] > demands[other]:
                assert shares[demand] >= shares[other] - 1


def test_who_wants_less_than_an_equal_share_leaves_the_rest_to_the_others() -> None:
    assert fair_shares(9.0, {"slow": 1.0, "a": ALL, "b": ALL}) == {"slow": 1.0, "a": 4.0, "b": 4.0}


@dataclass
class Sender:
    """A link that carries so many bytes a second, or its share where that is less."""

    name: str
    rate: float = ALL
    lost: float = 0.0
    is_full: bool = True
    share: float = 0.0
    delivered: float = 0.0
    resent: float = 0.0

    @property
    def carries(self) -> float:
        return min(self.rate, self.share or ALL)

    def tick(self, budget: RateBudget, now: float) -> None:
        if self.carries < ALL:
            self.delivered += self.carries / TICKS_PER_SECOND
        self.resent += self.lost / TICKS_PER_SECOND
        self.share = budget.share(
            self.name, LinkUsage(True, self.is_full, int(self.delivered), int(self.resent)), now=now
        )


def _run(budget: RateBudget, senders: Iterable[Sender], *, seconds: float, began: float = 0.0) -> None:
    for tick in range(round(TICKS_PER_SECOND * seconds)):
        for sender in senders:
            sender.tick(budget, began + tick / TICKS_PER_SECOND)


def test_links_that_do_not_send_take_nothing_and_know_what_they_would_get() -> None:
    budget, sends, idle = RateBudget(12e6), LinkUsage(True, True, 0, 0), LinkUsage(False, False, 0, 0)
    assert budget.share("a", sends, now=0.0) == 12e6
    assert budget.share("b", idle, now=0.0) == 6e6
    assert budget.share("a", sends, now=0.0) == 12e6
    assert budget.share("b", sends, now=0.0) == 6e6
    assert budget.share("a", sends, now=0.0) == 6e6


def test_what_links_that_wait_for_their_prefill_do_not_use_goes_to_the_one_that_could() -> None:
    budget, bulk = RateBudget(100e6), Sender("bulk")
    layers = [Sender(f"layers {number}", rate=3e6, is_full=False) for number in range(5)]
    _run(budget, [bulk, *layers], seconds=2)
    assert bulk.share == pytest.approx(100e6 - 5 * 3e6 / UNUSED_RATIO, rel=0.01)
    shares = [layer.share for layer in layers]
    assert shares == pytest.approx([100e6 / 6] * 5), (
        "a layer that comes then leaves at an equal share, not at their mean rate"
    )


def test_a_full_link_that_has_just_begun_is_made_room_for_and_one_that_stays_slow_is_not() -> None:
    budget, bulk, slow = RateBudget(100e6), Sender("bulk"), Sender("slow", rate=10e6)
    _run(budget, [bulk, slow], seconds=SLOW_SECONDS - 0.1)
    assert bulk.share == slow.share == 50e6
    _run(budget, [bulk, slow], seconds=2, began=SLOW_SECONDS - 0.1)
    assert bulk.share == pytest.approx(100e6 - 10e6 / UNUSED_RATIO, rel=0.01)
    slow.rate = ALL
    _run(budget, [bulk, slow], seconds=2, began=SLOW_SECONDS + 1.9)
    assert bulk.share == slow.share == 50e6


def test_a_budget_that_is_to_be_learned_limits_nobody_while_only_chance_loses() -> None:
    senders = [Sender(name, rate=50e6, lost=1e6) for name in "ab"]
    _run(RateBudget(0.0), senders, seconds=30)
    assert [sender.share for sender in senders] == [0.0, 0.0]


def test_a_budget_that_is_to_be_learned_is_what_arrives_while_bytes_are_lost_for_seconds_on_end() -> None:
    budget, senders = RateBudget(0.0), [Sender(name, rate=50e6, lost=5e6) for name in "ab"]
    _run(budget, senders, seconds=2)
    assert budget.bytes_per_second == ALL
    _run(budget, senders, seconds=1.2, began=2.0)
    assert budget.bytes_per_second == pytest.approx(100e6, rel=0.02)


def test_what_arrives_over_links_that_are_not_full_counts_in_what_is_learned() -> None:
    budget, bulk = RateBudget(0.0), Sender("bulk", rate=61e6, lost=6e6)
    layers = [Sender(f"layers {number}", rate=13e6, is_full=False) for number in range(3)]
    _run(budget, [bulk, *layers], seconds=3.2)
    assert budget.bytes_per_second == pytest.approx(100e6, rel=0.02)
    assert bulk.share == pytest.approx(100e6 - 3 * 13e6 / UNUSED_RATIO, rel=0.02)


def test_a_closed_link_gives_its_share_back() -> None:
    budget, sends = RateBudget(12e6), LinkUsage(True, True, 0, 0)
    budget.share("a", sends, now=0.0)
    budget.share("b", sends, now=0.0)
    budget.forget("a")
    assert budget.share("b", sends, now=0.0) == 12e6

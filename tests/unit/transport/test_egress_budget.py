"""A budget is shared by who sends, by demand, and never exceeded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.egress_budget import Demand, EgressBudget, fair_shares

ALL = float("inf")


@given(st.lists(st.floats(0, 1e10), min_size=1, max_size=8), st.integers(0, 2))
def test_shares_add_up_to_the_budget_and_nobody_who_wants_more_gets_less(some: list[float], num_all: int) -> None:
    demands = dict(enumerate([*some, *[ALL] * num_all]))
    shares = fair_shares(1e9, demands)
    assert abs(sum(shares.values()) - 1e9) < 1
    for one in demands:
        for other in demands:
            if demands[one] > demands[other]:
                assert shares[one] >= shares[other] - 1


def test_a_link_that_cannot_use_its_share_leaves_it_to_the_others() -> None:
    assert fair_shares(9.0, {"slow": 1.0, "a": ALL, "b": ALL}) == {"slow": 1.0, "a": 4.0, "b": 4.0}


def test_links_that_do_not_send_take_nothing_and_know_what_they_would_get() -> None:
    budget = EgressBudget(12.0)
    assert budget.share("a", Demand(True, ALL), now=0.0) == 12.0
    assert budget.share("b", Demand(False, 0.0), now=0.0) == 6.0
    assert budget.share("a", Demand(True, ALL), now=0.0) == 12.0
    assert budget.share("b", Demand(True, ALL), now=0.0) == 6.0
    assert budget.share("a", Demand(True, ALL), now=0.0) == 6.0


def _sending(budget: EgressBudget, *, carried: float, lost: float, began: float, seconds: int) -> float:
    """What two links may send each, after they have carried and lost as much each for so long."""
    share = 0.0
    for tick in range(20 * seconds):
        for link in ("a", "b"):
            share = budget.share(link, Demand(True, ALL, carried, lost), now=began + tick / 20)
    return share


def test_a_budget_that_is_to_be_learned_limits_nobody_while_only_chance_loses() -> None:
    assert _sending(EgressBudget(0.0), carried=50.0, lost=1.0, began=0.0, seconds=30) == 0.0


def test_a_budget_that_is_to_be_learned_is_what_arrives_while_bytes_are_lost_for_seconds_on_end() -> None:
    budget = EgressBudget(0.0)
    assert _sending(budget, carried=50.0, lost=5.0, began=0.0, seconds=2) == 0.0
    assert 49.0 < _sending(budget, carried=50.0, lost=5.0, began=2.0, seconds=3) < 51.0


def test_a_closed_link_gives_its_share_back() -> None:
    budget = EgressBudget(12.0)
    budget.share("a", Demand(True, ALL), now=0.0)
    budget.share("b", Demand(True, ALL), now=0.0)
    budget.forget("a")
    assert budget.share("b", Demand(True, ALL), now=0.0) == 12.0

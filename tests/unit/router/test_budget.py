"""Division of a limit among clients: all but a reserve for a lone one, equal shares once it is full."""

import pytest

from prfaas.router.http.budget import ClientBudget

TOTAL, RESERVE = 80, 10


def _fill(budget: ClientBudget, client: str) -> int:
    """Return how much a client can take."""
    count = 0
    while budget.take(client):
        count += 1
    return count


@pytest.fixture
def budget() -> ClientBudget:
    return ClientBudget("connections", TOTAL)


def test_lone_client_uses_all_but_the_reserve(budget: ClientBudget) -> None:
    assert _fill(budget, "gateway") == TOTAL - RESERVE


def test_clients_that_hold_nothing_take_no_share(budget: ClientBudget) -> None:
    assert all(budget.take(f"idle-{number}", 0) for number in range(TOTAL))
    _fill(budget, "gateway")
    assert _fill(budget, "other") == RESERVE


def test_next_client_uses_the_reserve(budget: ClientBudget) -> None:
    _fill(budget, "gateway")
    assert _fill(budget, "other") == RESERVE
    assert not budget.take("third")


def test_clients_of_a_full_budget_end_with_equal_shares(budget: ClientBudget) -> None:
    _fill(budget, "gateway")
    held = _fill(budget, "other")
    for _ in range(TOTAL):  # Both ask whenever a connection of the first client ends.
        budget.give_back("gateway")
        assert _fill(budget, "gateway") <= 1
        held += _fill(budget, "other")
        if held > TOTAL // 2:
            break
    assert TOTAL // 2 <= held <= TOTAL // 2 + RESERVE


def test_first_of_many_small_clients_is_always_served() -> None:
    budget = ClientBudget("connections", TOTAL)
    assert all(budget.take(f"client {number}") for number in range(TOTAL))
    assert not budget.take("another")


def test_any_client_may_hold_the_least_amount() -> None:
    budget = ClientBudget("body_bytes", TOTAL, least=60)
    assert budget.take("a", 60)
    assert not budget.take("b", 21)
    assert budget.take("b", 20)


def test_only_client_leaves_nothing_without_a_reserve() -> None:
    assert _fill(ClientBudget("requests", TOTAL, has_reserve=False), "default") == TOTAL

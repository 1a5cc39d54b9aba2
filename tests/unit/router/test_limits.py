"""Memory for request bodies: a lone client may use all of it, and leaves a share to the next."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.router.http import limits
from prfaas.router.http.admission import AdmissionRefused
from prfaas.router.http.limits import BodyBudget, HeldBody

BODY_BYTES = 20 << 20
MOST, SHARE = 10, 5  # Bodies of that size.


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(MOST * BODY_BYTES, SHARE * BODY_BYTES, 60.0)


def _take(
    budget: BodyBudget, count: int, *, address: str = "a", owner: str = "one", is_whole: bool = True
) -> list[HeldBody]:
    """Return bodies that have come, or are on their way."""
    bodies = [budget.hold(address, owner) for _ in range(count)]
    for body in bodies:
        body.take(BODY_BYTES)
        if is_whole:
            body.complete()
    return bodies


def _assert_full(budget: BodyBudget, **client: Any) -> None:
    with pytest.raises(AdmissionRefused):
        _take(budget, 1, **client)


def test_lone_client_gets_all_memory(budget: BodyBudget) -> None:
    _take(budget, MOST)
    _assert_full(budget)


@pytest.mark.parametrize(("address", "owner"), [("b", "one"), ("a", "two")])
def test_client_beside_another_gets_its_share(budget: BodyBudget, address: str, owner: str) -> None:
    _take(budget, SHARE)
    _take(budget, 1, address=address, owner=owner)
    _assert_full(budget)


def test_bodies_on_their_way_leave_room_for_the_next_client(budget: BodyBudget) -> None:
    _take(budget, SHARE, is_whole=False)
    _assert_full(budget, is_whole=False)
    _take(budget, MOST - SHARE, address="b", owner="two")


def test_client_is_alone_again_after_the_others_have_left(budget: BodyBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    _take(budget, 1, address="b")[0].release()
    monkeypatch.setattr(limits, "LONE_SECONDS", -1.0)
    _take(budget, MOST)


def test_released_body_makes_room_once(budget: BodyBudget) -> None:
    *_, last = _take(budget, MOST)
    with last:
        last.release()
    _take(budget, 1)
    _assert_full(budget)

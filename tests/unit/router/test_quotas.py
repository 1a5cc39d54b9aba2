"""What is left of a client's minute."""

from __future__ import annotations

import pytest

from prfaas.router.http.admission import Quota, QuotaExceeded, Quotas


def told(spent: QuotaExceeded | None) -> tuple[str, float] | None:
    """What is used up, and the wait in seconds to a tenth."""
    return None if spent is None else (spent.limit, round(spent.wait_seconds, 1))


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quotas(clock: Clock, **its: int) -> Quotas:
    return Quotas({"acme": Quota(**its)}, Quota(), clock)


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one(clock: Clock) -> None:
    its = quotas(clock, requests_per_minute=6)
    assert [its.admit("acme") for _ in range(6)] == [None] * 6
    assert told(its.admit("acme")) == ("requests", 10.0)
    clock.now += 4.0
    assert told(its.admit("acme")) == ("requests", 6.0)
    clock.now += 6.0
    assert its.admit("acme") is None
    assert told(its.admit("acme")) == ("requests", 10.0)


def test_a_client_that_was_quiet_for_long_has_one_minute_and_no_more(clock: Clock) -> None:
    its = quotas(clock, requests_per_minute=2)
    clock.now += 3600.0
    assert [its.admit("acme") is None for _ in range(3)] == [True, True, False]


def test_whoever_has_had_more_tokens_than_a_minutes_waits_until_they_are_made_up_for(clock: Clock) -> None:
    its = quotas(clock, tokens_per_minute=600)
    assert its.admit("acme") is None
    its.charge("acme", 900)
    assert told(its.admit("acme")) == ("tokens", 30.0)
    clock.now += 30.5
    assert its.admit("acme") is None


def test_tokens_that_were_estimated_and_not_used_are_given_back(clock: Clock) -> None:
    its = quotas(clock, tokens_per_minute=600)
    its.charge("acme", 600)
    assert its.admit("acme") is not None
    its.charge("acme", -600)
    its.charge("acme", -10_000)
    its.charge("acme", 599)
    assert its.admit("acme") is None
    its.charge("acme", 1)
    assert its.admit("acme") is not None, "no more than a minute's was given back"


def test_the_longer_wait_is_the_one_that_is_told(clock: Clock) -> None:
    its = quotas(clock, requests_per_minute=1, tokens_per_minute=60)
    its.admit("acme")
    its.charge("acme", 180)
    assert told(its.admit("acme")) == ("tokens", 120.0)


def test_clients_are_counted_apart_and_have_the_default_where_none_is_theirs(clock: Clock) -> None:
    its = Quotas({"acme": Quota(requests_per_minute=1)}, Quota(requests_per_minute=2), clock)
    assert [its.admit(who) is None for who in ("acme", "acme", "b", "b", "b", "c")] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]


def test_without_a_limit_nobody_waits(clock: Clock) -> None:
    its = quotas(clock)
    its.charge("acme", 10**9)
    assert all(its.admit("acme") is None for _ in range(1000))

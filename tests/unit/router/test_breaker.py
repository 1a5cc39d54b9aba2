"""When an endpoint is left alone, and for how long."""

from __future__ import annotations

from prfaas.router.engines.fleet import CircuitBreaker


def test_failures_on_end_open_it_and_afterwards_a_single_one_does() -> None:
    breaker = CircuitBreaker(limit=3, seconds=10.0)
    assert [breaker.failed(now) for now in (0.0, 1.0, 2.0)] == [False, False, True]
    assert breaker.is_open(11.9) and not breaker.is_open(12.0)
    assert breaker.failed(12.0) and breaker.is_open(21.9)


def test_an_answer_in_between_starts_the_count_anew() -> None:
    breaker = CircuitBreaker(limit=2, seconds=10.0)
    breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(1.0) and not breaker.is_open(1.0)


def test_requests_that_were_under_way_when_it_opened_prolong_nothing() -> None:
    breaker = CircuitBreaker(limit=1, seconds=10.0)
    assert breaker.failed(0.0) and not breaker.failed(9.0)
    assert not breaker.is_open(10.0)


def test_without_a_limit_it_never_opens() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.failed(float(now)) for now in range(100)) and not breaker.is_open(0.0)

"""Circuit breaker of one endpoint."""

import pytest

from prfaas.router.engines import fleet
from prfaas.router.engines.fleet import BREAKER_FAILURES, BREAKER_SECONDS, CircuitBreaker


def test_consecutive_failures_open_it_and_afterwards_each_failure_does() -> None:
    breaker = CircuitBreaker()
    opened = [breaker.failed(0.0) for _ in range(BREAKER_FAILURES)]
    assert opened == [False] * (BREAKER_FAILURES - 1) + [True]
    assert breaker.is_open(BREAKER_SECONDS - 0.1) and not breaker.is_open(BREAKER_SECONDS)
    assert breaker.failed(BREAKER_SECONDS) and breaker.is_open(2 * BREAKER_SECONDS - 0.1)


def test_success_resets_the_count() -> None:
    breaker = CircuitBreaker()
    for _ in range(BREAKER_FAILURES - 1):
        breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(1.0) and not breaker.is_open(1.0)


def test_failure_of_a_running_request_does_not_prolong_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "BREAKER_FAILURES", 1)
    breaker = CircuitBreaker()
    assert breaker.failed(0.0) and not breaker.failed(BREAKER_SECONDS - 1)
    assert not breaker.is_open(BREAKER_SECONDS)

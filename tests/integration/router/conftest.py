"""Fixtures of the router's tests."""

import pytest

from prfaas.router.engines import fleet


@pytest.fixture
def open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one failure open a circuit breaker for good."""
    monkeypatch.setattr(fleet, "BREAKER_FAILURES", 1)
    monkeypatch.setattr(fleet, "BREAKER_SECONDS", 3600.0)

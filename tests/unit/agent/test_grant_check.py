"""Failure reasons of refused transfers."""

from __future__ import annotations

import pytest

from prfaas.agent.transfer.grant_check import TransferRefused, refusal_reason
from prfaas.errors import GrantError, LayoutError, PrfaasError, RemoteProtocolError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferRefused("no_memory", "full"), "no_memory"),
        (GrantError("expired", "late"), "grant_refused"),
        (LayoutError("malformed"), "layout_mismatch"),
        (RemoteProtocolError("open_body", "no open"), "protocol"),
    ],
)
def test_each_error_has_one_failure_reason(error: PrfaasError | TransferRefused, reason: str) -> None:
    assert refusal_reason(error) == reason

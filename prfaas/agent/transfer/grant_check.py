"""Why an agent takes no part in a transfer or a copy that it was rightly asked for."""

from __future__ import annotations

from prfaas.errors import GrantError, LayoutError, PrfaasError
from prfaas.types import FailureReason


class Refusal(Exception):
    """Raised and caught where the question is decided; the other side gets `reason` and the message."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def reason_of(error: PrfaasError | Refusal) -> FailureReason:
    """What the other side hears for what was raised here."""
    if isinstance(error, Refusal):
        return error.reason
    if isinstance(error, GrantError):
        return "grant_refused"
    return "layout_mismatch" if isinstance(error, LayoutError) else "protocol"

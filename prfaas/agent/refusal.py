"""Why an agent takes no part in a transfer or a copy that it was rightly asked for."""

from __future__ import annotations

from prfaas.types import FailureReason


class Refusal(Exception):
    """Raised and caught where the question is decided; the other side gets `reason` and the message."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

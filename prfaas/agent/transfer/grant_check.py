"""Check of grants, and refusals of transfers and copies."""

import time

from prfaas import grants, metrics
from prfaas.errors import GrantError, LayoutError, PrfaasError
from prfaas.grants import Grant, GrantEnd, GrantKind
from prfaas.types import AgentName, FailureReason, TransferId


class TransferRefused(Exception):
    """This agent refuses a transfer or copy; the requester gets `reason` and the message."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def refusal_reason(error: PrfaasError | TransferRefused) -> FailureReason:
    """Return the reason for an error of this package, and count a refused grant."""
    if isinstance(error, TransferRefused):
        return error.reason
    if isinstance(error, GrantError):
        metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
        return "grant_refused"
    return "layout_mismatch" if isinstance(error, LayoutError) else "protocol"


class GrantCheck:
    """Check of every grant that this agent acts on: for sending, receiving and copies."""

    def __init__(self, name: AgentName, key: bytes) -> None:
        """Create the check of the agent `name`; `key` is derived from the deployment's secret."""
        self.agent = name
        self._key = key

    def as_source(self, token: bytes, kind: GrantKind, transfer_id: TransferId) -> Grant:
        """Return the grant that lets this agent send.

        Raises:
            GrantError: The grant is invalid or expired, or covers another kind, agent or transfer.
        """
        return self._verify(token, kind, transfer_id, "source")

    def as_destination(self, token: bytes, kind: GrantKind, transfer_id: TransferId, *, peer: str | None) -> Grant:
        """Return the grant that lets this agent receive from `peer`; from any peer if None, for a local engine.

        Raises:
            GrantError: As for `as_source`, or the grant lets another agent send.
        """
        grant = self._verify(token, kind, transfer_id, "destination")
        if peer is not None and grant.source != peer:
            raise GrantError("not_theirs", f"the grant lets {grant.source} send, not {peer}")
        return grant

    def _verify(self, token: bytes, kind: GrantKind, transfer_id: TransferId, end: GrantEnd) -> Grant:
        return grants.verify_end(
            token, self._key, kind=kind, end=end, agent=self.agent, transfer_id=transfer_id, now=time.time()
        )


def seconds_left(grant: Grant) -> float:
    """Return the seconds until a grant expires; negative afterwards."""
    return grant.expires_at - time.time()


def check_granted_bytes(num_bytes: int, grant: Grant) -> None:
    """Raise GrantError if the grant allows fewer bytes."""
    if num_bytes > grant.max_bytes:
        raise GrantError("too_large", f"{num_bytes} bytes; the grant allows {grant.max_bytes}")

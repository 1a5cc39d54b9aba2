"""Request as decisions see it, and the plan that they lead to."""

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import TransferId

REQUEST_ID_BYTES = 8


@dataclass(frozen=True)
class RoutingRequest:
    """Request as decisions see it. Without a `prompt` its tokens do not matter. `tenant` salts its hashes.

    `request_id` identifies the request at the managers, however often it is decided.
    """

    facts: RequestFacts
    model: str | None
    prompt: list[int] | None = None
    session: str = ""
    tenant: str = ""
    request_id: bytes = field(default_factory=partial(secrets.token_bytes, REQUEST_ID_BYTES))


@dataclass(frozen=True)
class RoutePlan:
    """Decision for one request, and what its execution needs. A remote route has `transfer_id` and `grant`.

    `decision_id` identifies a manager's decision: its page `/decisions/<id>` has the snapshot.
    `fell_back`: the prefill leg was given up. `is_alone`: no manager answered, so the router decided.
    """

    decision: Decision
    facts: RequestFacts
    snapshot: Snapshot
    decided_by: str = "router"
    decision_id: str = ""
    transfer_id: TransferId | None = None
    grant: str = ""
    fell_back: bool = False
    is_alone: bool = False

    @property
    def promised_tokens(self) -> int:
        """Return the tokens that the manager expects to be cached on the instance that prefills."""
        return self.facts.num_cached_tokens if self.decided_by == "manager" and not self.fell_back else 0

    @property
    def is_remote(self) -> bool:
        """Return whether both legs are to be sent."""
        return self.decision.route == "remote" and not self.fell_back

    def summary(self) -> dict[str, Any]:
        """Return the fields for the request's log line."""
        return {
            "route": self.decision.route,
            "reason": self.decision.reason,
            "decode": self.decision.decode,
            "prefill": self.decision.prefill,
            "decided_by": self.decided_by,
            "decision_id": self.decision_id or None,
            "num_prompt_tokens": self.facts.num_prompt_tokens,
            "num_cached_tokens": self.facts.num_cached_tokens,
            "counted": self.facts.counted,
            "obstacle": self.facts.obstacle,
            "transfer_id": self.transfer_id.hex() if self.transfer_id else None,
        }

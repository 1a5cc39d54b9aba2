"""Latest decisions of a manager, each with the snapshot and facts that reproduce it."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.scheduler.explanation import clusters_of, describe
from prfaas.scheduler.route import Decision, explain
from prfaas.scheduler.snapshot import RequestFacts, Snapshot

MAX_DECISIONS = 1024  # About 10 KB each in a deployment of fifty instances.


@dataclass(frozen=True)
class RecordedDecision:
    """A decision. `scheduler.route` reproduces it from `snapshot` and `facts`."""

    at: float  # Unix time in seconds.
    model: str
    tenant: str
    session: str
    snapshot: Snapshot
    facts: RequestFacts
    decision: Decision

    def document(self) -> dict[str, Any]:
        """Return the whole decision, for people and for a replay."""
        return {
            "at": self.at,
            "model": self.model,
            "tenant": self.tenant,
            "session": self.session,
            "explanation": explain(self.decision, self.facts),
            "decision": asdict(self.decision),
            "facts": self.facts.to_dict(),
            "snapshot": self.snapshot.to_dict(),
            **describe(self.snapshot, self.facts, self.decision),
        }

    def summary(self) -> dict[str, Any]:
        """Return one row of a list."""
        described = describe(self.snapshot, self.facts, self.decision)
        return {
            "at": self.at,
            "model": self.model,
            "tenant": self.tenant,
            "clusters": clusters_of(self.snapshot, self.decision),
            "session": self.session,
            "route": self.decision.route,
            "reason": self.decision.reason,
            "prefill": self.decision.prefill,
            "decode": self.decision.decode,
            "num_prompt_tokens": self.facts.num_prompt_tokens,
            "num_uncached_tokens": described["num_uncached_tokens"],
            "threshold_tokens": described["threshold_tokens"],
        }


class DecisionLog:
    """The last `MAX_DECISIONS` decisions by request id. A repeated decision replaces the earlier one."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[bytes, RecordedDecision] = OrderedDict()

    def remember(self, request_id: bytes, decision: RecordedDecision) -> None:
        if not request_id:
            return
        self._by_id[request_id] = decision
        self._by_id.move_to_end(request_id)
        if len(self._by_id) > MAX_DECISIONS:
            self._by_id.popitem(last=False)

    def get(self, request_id: bytes) -> RecordedDecision | None:
        return self._by_id.get(request_id)

    def latest(self) -> Iterator[tuple[bytes, RecordedDecision]]:
        """Yield request ids and decisions, newest first."""
        return reversed(self._by_id.items())

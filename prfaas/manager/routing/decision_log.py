"""Latest decisions of a manager, each with the snapshot and facts that reproduce it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.scheduler.route import Decision, explain
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import ClusterName

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
            "explanation": explain(self.decision, self.facts),
            "decision": asdict(self.decision),
            "facts": self.facts.to_dict(),
            "snapshot": self.snapshot.to_dict(),
        }

    def summary(self) -> dict[str, Any]:
        """Return one row of a list."""
        return {
            "at": self.at,
            "model": self.model,
            "tenant": self.tenant,
            "clusters": self.clusters(),
            "session": self.session,
            "route": self.decision.route,
            "reason": self.decision.reason,
            "prefill": self.decision.prefill,
            "decode": self.decision.decode,
            "num_prompt_tokens": self.facts.num_prompt_tokens,
            "num_uncached_tokens": self._num_uncached_tokens(),
            "threshold_tokens": self.threshold_tokens(),
        }

    def clusters(self) -> tuple[str, str]:
        """Return the clusters that prefill and decode; empty where nobody does."""
        decision, places = self.decision, {item.instance: item.cluster for item in self.snapshot.instances}
        destination = places.get(decision.decode, "") if decision.decode else ""
        return (places.get(decision.prefill, "") if decision.prefill else destination), destination

    def threshold_tokens(self) -> int:
        """Return the t that decided: that of the chosen path, or of the best congested one, else the deployment's."""
        source, destination = self.clusters()
        if self.decision.reason == "congested":
            congested = [path.threshold_tokens for path in self.snapshot.paths if path.destination == destination]
            return min(congested, default=self.snapshot.threshold_tokens)
        if source == destination:
            return self.snapshot.threshold_tokens
        return self.snapshot.path(ClusterName(source), ClusterName(destination)).threshold_tokens

    def _num_uncached_tokens(self) -> int | None:
        """Return the uncached tokens at the decode node, which the threshold is compared with; None without a decode
        node.
        """
        agents = {instance.instance: instance.agent for instance in self.snapshot.instances}
        agent = agents.get(self.decision.decode) if self.decision.decode is not None else None
        return None if agent is None else self.facts.uncached_at(agent)


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

"""What a decision is made from: the deployment and the request, as plain data that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole


@dataclass(frozen=True)
class InstanceState:
    """One engine as the decision sees it."""

    instance: InstanceId
    cluster: ClusterName
    cluster_kind: ClusterKind
    role: InstanceRole
    agent: AgentName
    healthy: bool = True
    num_requests: int = 0  # that this router has under way there

    @property
    def prefills_for_others(self) -> bool:
        """Only a PrfaaS cluster takes prefill from another cluster."""
        return self.healthy and self.cluster_kind == "prfaas" and self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """PrfaaS clusters never decode."""
        return self.healthy and self.cluster_kind == "pd" and self.role in ("decode", "both")


@dataclass(frozen=True)
class Snapshot:
    """The deployment at one moment."""

    threshold_tokens: int
    instances: tuple[InstanceState, ...]
    links_down: frozenset[tuple[ClusterName, ClusterName]] = frozenset()  # (from, to)

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["links_down"] = sorted(map(list, self.links_down))
        return fields

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Snapshot:
        """The inverse of `to_dict`."""
        return Snapshot(
            threshold_tokens=fields["threshold_tokens"],
            instances=tuple(InstanceState(**instance) for instance in fields["instances"]),
            links_down=frozenset((ClusterName(a), ClusterName(b)) for a, b in fields["links_down"]),
        )


@dataclass(frozen=True)
class RequestFacts:
    """What of a request decides its route.

    `num_prompt_tokens` is an upper bound when `counted` is false: the prompt was too short to be worth tokenising.
    `num_cached_tokens` is the usable prefix wherever `cached_tokens` (by node) says nothing else.
    """

    num_prompt_tokens: int
    counted: bool = True
    num_cached_tokens: int = 0
    transferable: bool = True  # plain text, one prompt, one answer: its KV can be named by its token ids
    cached_tokens: Mapping[AgentName, int] = field(default_factory=dict)
    session_agent: AgentName | None = None  # the node that served this conversation's turn before
    excluded: frozenset[InstanceId] = frozenset()  # tried already, without success

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens

    def cached_at(self, agent: AgentName) -> int:
        """The usable prefix on one node."""
        return self.cached_tokens.get(agent, self.num_cached_tokens)

    def uncached_at(self, agent: AgentName) -> int:
        """What a prefill on that node would have to compute."""
        return self.num_prompt_tokens - self.cached_at(agent)

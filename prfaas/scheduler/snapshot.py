"""Input of a decision: the deployment and the request, as plain data that can be recorded and replayed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from prfaas.model.planning.plan import PlannedRoute
from prfaas.scheduler.ppd import PpdTable
from prfaas.scheduler.threshold import PathCost
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole, LocalPolicy

# Reasons why one list of token ids cannot name a request's KV, so that its decode instance must prefill it.
Obstacle = Literal["media", "several_prompts", "several_answers", "prompt_output", "adapter", "not_tokenised"]


@dataclass(frozen=True)
class InstanceState:
    """State of one engine.

    `num_requests` counts the running requests that the decider knows of. `kv_usage_ratio` is the engine's last report.
    Only the endpoint picker reads the fields from `num_running` on. `num_in_flight` counts the asker's own requests.
    `last_cold_use` is when the engine last took a request that nobody had cached; only the order counts.
    """

    instance: InstanceId
    cluster: ClusterName
    cluster_kind: ClusterKind
    role: InstanceRole
    agent: AgentName
    healthy: bool = True
    num_requests: int = 0
    kv_usage_ratio: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_in_flight: int = 0
    num_in_flight_tokens: int = 0
    last_cold_use: float | None = None

    @property
    def prefills_for_others(self) -> bool:
        """Return whether it may prefill for other clusters, as only PrfaaS clusters do."""
        return self.healthy and self.cluster_kind == "prfaas" and self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """Return whether it may decode. PrfaaS clusters never do."""
        return self.healthy and self.cluster_kind == "pd" and self.role in ("decode", "both")

    def prefills_within(self, cluster: ClusterName) -> bool:
        """Return whether it is a PD-P instance of this cluster."""
        return self.healthy and self.cluster == cluster and self.cluster_kind == "pd" and self.role == "prefill"


@dataclass(frozen=True)
class PathState:
    """State of the path from one cluster to another.

    `threshold_tokens` is this path's t, which congestion raises. `is_abundant` is the rule of `threshold.py`.
    Without a measured `cost` every transfer counts as worthwhile.
    """

    source: ClusterName
    destination: ClusterName
    threshold_tokens: int
    is_abundant: bool = False
    cost: PathCost | None = None


@dataclass(frozen=True)
class Snapshot:
    """Deployment at one moment. A path without a `PathState` has the deployment's t and scarce bandwidth.

    Attributes:
        links_down: Pairs (from, to) of clusters without a working link.
        ppd_table: Decision table of the policy `ppd`.
        requests_per_second: Requests arriving at the PD cluster, for PPD's table.
        endpoint_picker: EndpointPickerConfig as YAML, for the policy `endpoint_picker`.
        local_turns_ratio: PPD's x for the policy `static`: share of later turns that decode instances prefill.
        fetch_tokens: Surplus from which a longer prefix on another node is fetched; 0 turns fetching off.
        routes: Routes of the plan by length and tenant; without any, the threshold decides alone.
    """

    threshold_tokens: int
    instances: tuple[InstanceState, ...]
    links_down: frozenset[tuple[ClusterName, ClusterName]] = frozenset()
    paths: tuple[PathState, ...] = ()
    local_policy: LocalPolicy = "decode"
    ppd_table: PpdTable | None = None
    requests_per_second: float = 0.0
    endpoint_picker: str = ""
    local_turns_ratio: float = 0.0
    fetch_tokens: int = 0
    routes: tuple[PlannedRoute, ...] = ()

    def path(self, source: ClusterName, destination: ClusterName) -> PathState:
        """Return the state of the path between two clusters."""
        for path in self.paths:
            if (path.source, path.destination) == (source, destination):
                return path
        return PathState(source, destination, self.threshold_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can hold."""
        fields: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return fields


@dataclass(frozen=True)
class RequestFacts:
    """Properties of a request that decide its route.

    Attributes:
        num_prompt_tokens: Upper bound if `counted` is false, because a short prompt is not worth tokenising.
        num_cached_tokens: Usable prefix on each node that `cached_tokens` does not name.
        session_agent: Node that served the previous turn of this session.
        excluded: Instances that already failed for this request.
        turn: 1 for the first turn of a session; 0 if unknown.
        max_output_tokens: 0 if unknown.
        caches_known: False while no node has registered a layout of the model, so that nothing counts as cached.
        seed: Spreads requests over equal instances; 0 orders these by name.
        clusters: Clusters that may see the prompt and its KV; empty: all.
        home: PD cluster that is preferred to others; None: all are equal.
    """

    num_prompt_tokens: int
    counted: bool = True
    num_cached_tokens: int = 0
    obstacle: Obstacle | None = None
    cached_tokens: Mapping[AgentName, int] = field(default_factory=dict)
    session_agent: AgentName | None = None
    excluded: frozenset[InstanceId] = frozenset()
    turn: int = 0
    max_output_tokens: int = 0
    caches_known: bool = True
    seed: int = 0
    clusters: frozenset[ClusterName] = frozenset()
    home: ClusterName | None = None

    def cached_at(self, agent: AgentName) -> int:
        """Return the usable prefix on one node, in tokens."""
        return self.cached_tokens.get(agent, self.num_cached_tokens)

    def uncached_at(self, agent: AgentName) -> int:
        """Return the tokens that a prefill on that node would have to compute."""
        return self.num_prompt_tokens - self.cached_at(agent)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can hold."""
        fields: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return fields

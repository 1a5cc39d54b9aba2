"""What a decision is made from: the deployment and the request, as plain data that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prfaas.scheduler.ppd import PpdMode, PpdTable
from prfaas.scheduler.threshold import PathCost
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

# Why the KV of a request cannot be named by one list of token ids, so that it is prefilled where it is decoded.
Obstacle = Literal["media", "several_prompts", "several_answers", "prompt_output", "adapter", "not_tokenised"]
# What prefills a request that no PrfaaS cluster takes, within the PD cluster (`within.py`).
OwnPolicy = Literal["decode", "pd", "ppd", "static", "suffix"]
LocalPolicy = OwnPolicy | Literal["endpoint_picker"]
# A request that is to be prefilled elsewhere while nobody is there to do it: its decode instance does, or it is refused.
WithoutPrefill = Literal["local", "refuse"]


@dataclass(frozen=True)
class InstanceState:
    """One engine as the decision sees it."""

    instance: InstanceId
    cluster: ClusterName
    cluster_kind: ClusterKind
    role: InstanceRole
    agent: AgentName
    healthy: bool = True
    num_requests: int = 0  # under way there, as far as the decider knows
    kv_usage_ratio: float = 0.0  # of its KV blocks those that requests hold, as it last said
    # What only an endpoint picker reads:
    num_running: int = 0
    num_waiting: int = 0
    num_in_flight: int = 0  # requests that the asker sent there and that have not ended
    num_in_flight_tokens: int = 0  # the prompts of those, in tokens
    last_cold_use: float | None = None  # when it last took a request that nobody had cached; only the order counts

    @property
    def prefills_for_others(self) -> bool:
        """Only a PrfaaS cluster takes prefill from another cluster."""
        return self.healthy and self.cluster_kind == "prfaas" and self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """PrfaaS clusters never decode."""
        return self.healthy and self.cluster_kind == "pd" and self.role in ("decode", "both")

    def prefills_within(self, cluster: ClusterName) -> bool:
        """Return whether it is a PD-P instance of this cluster."""
        return self.healthy and self.cluster == cluster and self.cluster_kind == "pd" and self.role == "prefill"


@dataclass(frozen=True)
class PathState:
    """The link from one cluster to another, as the loop that watches it has left it."""

    source: ClusterName
    destination: ClusterName
    threshold_tokens: int  # t of this pair: the deployment's, raised while the link is congested (`congestion.py`)
    is_abundant: bool = False  # the bandwidth-abundant rule holds (`threshold.py`)
    cost: PathCost | None = None  # None: not measured, so every transfer is taken to pay


@dataclass(frozen=True)
class Snapshot:
    """The deployment at one moment. A pair of clusters without a `PathState` has the deployment's t, and is scarce."""

    threshold_tokens: int
    instances: tuple[InstanceState, ...]
    links_down: frozenset[tuple[ClusterName, ClusterName]] = frozenset()  # (from, to)
    paths: tuple[PathState, ...] = ()
    local_policy: LocalPolicy = "decode"
    non_cached_tokens: int = 0  # of `suffix`: so many uncached tokens go to a PD-P instance
    ppd_table: PpdTable | None = None  # of `ppd`
    ppd_mode: PpdMode = "paper"
    requests_per_second: float = 0.0  # arriving at the PD cluster, for PPD's table
    endpoint_picker: str = ""  # of `endpoint_picker`: an EndpointPickerConfig as YAML
    without_prefill: WithoutPrefill = "local"
    local_turns_ratio: float = 0.0  # of `static`: PPD's x, the share of later turns that the decode instances prefill
    fetch_tokens: int = 0  # a prefix elsewhere that is so much longer is fetched (`fetch.py`); 0: none is

    def path(self, source: ClusterName, destination: ClusterName) -> PathState:
        """Return the state of the link between two clusters."""
        for path in self.paths:
            if (path.source, path.destination) == (source, destination):
                return path
        return PathState(source, destination, self.threshold_tokens)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        fields = asdict(self)
        fields["links_down"] = sorted(map(list, self.links_down))
        fields["ppd_table"] = self.ppd_table.to_dict() if self.ppd_table else None
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Snapshot:
        """Return the inverse of `to_dict`."""
        table = fields["ppd_table"]
        read = {
            "instances": tuple(InstanceState(**instance) for instance in fields["instances"]),
            "links_down": frozenset((ClusterName(a), ClusterName(b)) for a, b in fields["links_down"]),
            "paths": tuple(_path(path) for path in fields["paths"]),
            "ppd_table": PpdTable.from_dict(table) if table else None,
        }
        return Snapshot(**{**fields, **read})


def _path(fields: Mapping[str, Any]) -> PathState:
    cost = fields["cost"]
    return PathState(**{**fields, "cost": PathCost(**cost) if cost else None})


@dataclass(frozen=True)
class RequestFacts:
    """What of a request decides its route.

    `num_prompt_tokens` is an upper bound when `counted` is false: the prompt was too short to be worth tokenising.
    `num_cached_tokens` is the usable prefix wherever `cached_tokens` (by node) says nothing else.
    """

    num_prompt_tokens: int
    counted: bool = True
    num_cached_tokens: int = 0
    obstacle: Obstacle | None = None
    cached_tokens: Mapping[AgentName, int] = field(default_factory=dict)
    session_agent: AgentName | None = None  # the node that served this conversation's turn before
    excluded: frozenset[InstanceId] = frozenset()  # tried already, without success
    turn: int = 0  # 1 for a conversation's first; 0: unknown
    max_output_tokens: int = 0  # 0: unknown
    caches_known: bool = True  # False: no node has told how its model's KV lies, so nothing counts as cached
    seed: int = 0  # orders instances that are equally good, so that requests spread; 0: by name

    def cached_at(self, agent: AgentName) -> int:
        """Return the usable prefix on one node."""
        return self.cached_tokens.get(agent, self.num_cached_tokens)

    def uncached_at(self, agent: AgentName) -> int:
        """What a prefill on that node would have to compute."""
        return self.num_prompt_tokens - self.cached_at(agent)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "excluded": sorted(self.excluded)}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> RequestFacts:
        """Return the inverse of `to_dict`."""
        return RequestFacts(**{**fields, "excluded": frozenset(fields["excluded"])})

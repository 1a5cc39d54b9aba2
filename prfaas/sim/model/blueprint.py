"""What a twin is told of its deployment: nodes, what carries KV between them, and the rules of the route."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prfaas.model.cost.curve import Curve
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.model.colocated import SharingSpec
from prfaas.sim.model.engine import InstanceSpec
from prfaas.sim.model.instance_faults import Operations
from prfaas.sim.model.prefix_cache import CacheRules
from prfaas.sim.model.request import Request
from prfaas.types import ClusterName, InstanceId

FollowUp = Callable[[Request, float], Request | None]  # the request that an answer calls forth, given when it ended
Watch = Callable[[Snapshot, RequestFacts, Decision], None]  # sees every decision with what it was made from
Assign = Callable[[Request], tuple[Snapshot, frozenset[InstanceId]]]
DEFAULT_CACHE_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Node:
    """One machine with one engine: what the scheduler knows of it, how it computes, what its cache may hold.

    With `sharing` it prefills and decodes at the same time.
    """

    state: InstanceState
    spec: InstanceSpec
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    sharing: SharingSpec | None = None


@dataclass(frozen=True)
class Wires:
    """What carries KV: S_kv(l), each cluster's egress to others, each node's rate within its cluster.

    `setup_seconds` pass before each transfer's first byte. With `sends_all` also what the receiver holds is sent.
    """

    kv: Curve
    egress_bytes_per_second: Mapping[ClusterName, float]
    intra_bytes_per_second: float = math.inf
    rtt_seconds: float = 0.0
    setup_seconds: float = 0.0
    num_layers: int = 1
    sends_all: bool = False
    loss_ratio: float = 0.0  # as TCP reports it; the rates above already bear it


@dataclass(frozen=True)
class Rules:
    """The snapshot's fixed part, and what stands before the engines.

    A request takes `overhead_seconds` and `overhead_per_token_seconds` for each prompt token before its engine has it.
    No more than `max_sessions` conversations are under way; the others wait before they are routed. `assign` gives a
    request rules of its own, and the decode instances that it may not go to. With `follows_congestion` t rises while the
    egress of a cluster is congested.
    """

    snapshot: Snapshot
    caches: CacheRules = field(default_factory=CacheRules)
    overhead_seconds: float = 0.0
    overhead_per_token_seconds: float = 0.0
    max_sessions: float = math.inf
    assign: Assign | None = None
    operations: Operations = field(default_factory=Operations)
    follows_congestion: bool = False

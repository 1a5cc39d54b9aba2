"""Copies of hot prefixes to further nodes: PrfaaS's rebalancing against hotspots, as a pure function.

Three rules keep it calm:

- The wanted number of holders rises with the hits at once, and falls only well below the rate at which it rose.
- A prefix is ordered to a node at most once in `repeat_seconds`, so a node that evicts it is left alone.
- Every byte is charged to two budgets first: the sending cluster's egress and the receiving node's intake.
  An intake budget starts empty, so a node that has just joined fills no faster than any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas.types import AgentName, BlockHash, ClusterName

PrefixKey = tuple[str, BlockHash]  # Model, and the hash of the last token.


@dataclass(frozen=True)
class HotPrefix:
    """Prefix in demand. `nodes` could hold it, `holders` do, and a copy moves at most `num_bytes`."""

    key: PrefixKey
    hits_per_second: float
    num_bytes: int
    nodes: frozenset[AgentName]
    holders: frozenset[AgentName]


@dataclass(frozen=True)
class PlannedCopy:
    """Copy of a prefix from one node to another."""

    key: PrefixKey
    source: AgentName
    destination: AgentName
    num_bytes: int


@dataclass(frozen=True)
class Participants:
    """Nodes and running copies. Only `senders` may send, `leaving` nodes receive nothing, `full_links` carry nothing."""

    clusters: Mapping[AgentName, ClusterName]
    senders: frozenset[AgentName]
    leaving: frozenset[AgentName] = frozenset()
    full_links: frozenset[tuple[ClusterName, ClusterName]] = frozenset()
    under_way: tuple[PlannedCopy, ...] = ()


@dataclass(frozen=True)
class RebalanceLimits:
    """Limits of rebalancing. A budget holds at most `burst_seconds` of its rate.

    A prefix deserves one more holder for every `hits_per_holder_per_second`, and loses it below `fall_ratio` of that rate.
    """

    egress_bytes_per_second: float
    intake_bytes_per_second: float
    hits_per_holder_per_second: float = 1.0
    fall_ratio: float = 0.5
    max_holders: int = 8
    repeat_seconds: float = 300.0
    burst_seconds: float = 10.0


@dataclass(frozen=True)
class ByteBudget:
    """Bytes that may move, as of `at`."""

    num_bytes: float
    at: float

    def filled(self, rate: float, burst_seconds: float, now: float) -> ByteBudget:
        return ByteBudget(min(rate * burst_seconds, self.num_bytes + rate * max(0.0, now - self.at)), now)


@dataclass(frozen=True)
class RebalanceState:
    """State between two steps. Times are seconds on a monotonic clock."""

    wanted: Mapping[PrefixKey, int] = field(default_factory=dict)
    ordered_at: Mapping[tuple[PrefixKey, AgentName], float] = field(default_factory=dict)
    egress: Mapping[ClusterName, ByteBudget] = field(default_factory=dict)
    intake: Mapping[AgentName, ByteBudget] = field(default_factory=dict)


def step(
    state: RebalanceState,
    prefixes: Sequence[HotPrefix],
    participants: Participants,
    *,
    now: float,
    limits: RebalanceLimits,
) -> tuple[RebalanceState, list[PlannedCopy]]:
    """Return the next state and the copies to order now: hottest prefix first, one for each prefix and node."""
    state = _refill(state, participants, now=now, limits=limits)
    state = replace(state, wanted=_wanted_holders(state.wanted, prefixes, limits))
    copies: list[PlannedCopy] = []
    for prefix in sorted(prefixes, key=lambda prefix: (-prefix.hits_per_second, prefix.key)):
        copy = _next_copy(state, prefix, participants, [*participants.under_way, *copies])
        if copy is not None:
            copies.append(copy)
            state = _charge(state, copy, participants, now=now)
    return state, copies


def _refill(
    state: RebalanceState, participants: Participants, *, now: float, limits: RebalanceLimits
) -> RebalanceState:
    empty, burst = ByteBudget(0.0, now), limits.burst_seconds
    return replace(
        state,
        ordered_at={order: at for order, at in state.ordered_at.items() if now - at < limits.repeat_seconds},
        egress={
            cluster: state.egress.get(cluster, empty).filled(limits.egress_bytes_per_second, burst, now)
            for cluster in {*participants.clusters.values()}
        },
        intake={
            node: state.intake.get(node, empty).filled(limits.intake_bytes_per_second, burst, now)
            for node in participants.clusters
        },
    )


def _wanted_holders(
    before: Mapping[PrefixKey, int], prefixes: Sequence[HotPrefix], limits: RebalanceLimits
) -> dict[PrefixKey, int]:
    """Return the wanted number of holders of each prefix: rising at once, falling with hysteresis."""
    wanted = {}
    for prefix in prefixes:
        deserved = min(limits.max_holders, int(prefix.hits_per_second / limits.hits_per_holder_per_second))
        known = before.get(prefix.key, 1)
        keeps = prefix.hits_per_second >= known * limits.hits_per_holder_per_second * limits.fall_ratio
        wanted[prefix.key] = max(1, deserved, known if keeps else 1)
    return wanted


def _next_copy(
    state: RebalanceState, prefix: HotPrefix, participants: Participants, running: Sequence[PlannedCopy]
) -> PlannedCopy | None:
    """Return the next copy of one prefix, or None if it has enough holders or no copy is possible now."""
    coming = {copy.destination for copy in running if copy.key == prefix.key}
    if len(prefix.holders - participants.leaving) + len(coming) >= state.wanted[prefix.key]:
        return None
    busy = {copy.destination for copy in running}
    pairs = [
        (source, destination)
        for destination in prefix.nodes - prefix.holders - participants.leaving - busy
        if _may_receive(state, prefix, destination)
        for source in prefix.holders & participants.senders
        if _may_send(state, prefix, source, destination, participants)
    ]
    if not pairs:
        return None
    source, destination = min(pairs, key=lambda pair: _rank(state, pair, participants, running))
    return PlannedCopy(prefix.key, source, destination, prefix.num_bytes)


def _may_receive(state: RebalanceState, prefix: HotPrefix, node: AgentName) -> bool:
    intake = state.intake.get(node)
    return (prefix.key, node) not in state.ordered_at and intake is not None and prefix.num_bytes <= intake.num_bytes


def _may_send(
    state: RebalanceState, prefix: HotPrefix, source: AgentName, destination: AgentName, participants: Participants
) -> bool:
    clusters = participants.clusters
    if source not in clusters or destination not in clusters:
        return False
    path = (clusters[source], clusters[destination])
    return path not in participants.full_links and prefix.num_bytes <= state.egress[clusters[source]].num_bytes


def _rank(
    state: RebalanceState, pair: tuple[AgentName, AgentName], participants: Participants, running: Sequence[PlannedCopy]
) -> tuple[bool, float, int, AgentName, AgentName]:
    """Return the rank of a pair: within a cluster first, then the least served destination, then the least busy source."""
    source, destination = pair
    is_far = participants.clusters[source] != participants.clusters[destination]
    num_sending = sum(copy.source == source for copy in running)
    return is_far, -state.intake[destination].num_bytes, num_sending, destination, source


def _charge(state: RebalanceState, copy: PlannedCopy, participants: Participants, *, now: float) -> RebalanceState:
    cluster = participants.clusters[copy.source]
    egress, intake = state.egress[cluster], state.intake[copy.destination]
    return replace(
        state,
        ordered_at={**state.ordered_at, (copy.key, copy.destination): now},
        egress={**state.egress, cluster: replace(egress, num_bytes=egress.num_bytes - copy.num_bytes)},
        intake={**state.intake, copy.destination: replace(intake, num_bytes=intake.num_bytes - copy.num_bytes)},
    )


def drain_order(prefixes: Collection[HotPrefix], leaving: AgentName) -> list[HotPrefix]:
    """Return the prefixes worth moving off a leaving node: in demand and held by no other node, hottest first."""
    sole = (prefix for prefix in prefixes if prefix.holders == {leaving} and prefix.hits_per_second > 0)
    return sorted(sole, key=lambda prefix: (-prefix.hits_per_second, prefix.key))

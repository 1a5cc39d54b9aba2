"""Which hot prefixes are copied to which further nodes: PrfaaS's rebalancing against hotspots (pure).

Three things keep it calm. How many nodes should hold a prefix rises with its hits at once and falls only well below the
rate it rose at. A prefix is ordered to a node once in `repeat_seconds`, however that ended, so that a node which evicts it
is left alone. And every byte is taken from two budgets before it moves: the sending cluster's egress and the receiving
node's intake, which starts empty, so that a node that has just joined fills no faster than any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas.types import AgentName, BlockHash, ClusterName

PrefixKey = tuple[str, BlockHash]  # model, and the hash of its last token


@dataclass(frozen=True)
class HotPrefix:
    """A prefix that is asked for. `nodes` could hold it, `holders` do; `num_bytes` is what a copy moves at most."""

    key: PrefixKey
    hits_per_second: float
    num_bytes: int
    nodes: frozenset[AgentName]
    holders: frozenset[AgentName]


@dataclass(frozen=True)
class PlannedCopy:
    """Copy a prefix."""

    key: PrefixKey
    source: AgentName
    destination: AgentName
    num_bytes: int


@dataclass(frozen=True)
class Participants:
    """Who is there. Only `senders` may be told to send; `leaving` nodes receive nothing; over `full_links` nothing goes."""

    clusters: Mapping[AgentName, ClusterName]
    senders: frozenset[AgentName]
    leaving: frozenset[AgentName] = frozenset()
    full_links: frozenset[tuple[ClusterName, ClusterName]] = frozenset()
    under_way: tuple[PlannedCopy, ...] = ()


@dataclass(frozen=True)
class RebalanceLimits:
    """How eager rebalancing may be. A budget holds at most `burst_seconds` of its rate."""

    egress_bytes_per_second: float
    intake_bytes_per_second: float
    hits_per_holder_per_second: float = 1.0  # one more holder for each so many
    fall_ratio: float = 0.5  # of the rate at which a holder was wanted: below it, it is wanted no more
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
    """What one step leaves for the next. Times are seconds on a clock that only goes forward."""

    wanted: Mapping[PrefixKey, int] = field(default_factory=dict)
    ordered_at: Mapping[tuple[PrefixKey, AgentName], float] = field(default_factory=dict)
    egress: Mapping[ClusterName, ByteBudget] = field(default_factory=dict)
    intake: Mapping[AgentName, ByteBudget] = field(default_factory=dict)


def step(
    state: RebalanceState, prefixes: Sequence[HotPrefix], cast: Participants, *, now: float, limits: RebalanceLimits
) -> tuple[RebalanceState, list[PlannedCopy]]:
    """The copies to order now, hottest prefix first and one for each prefix and node; and the state for the next step."""
    state = _refilled(state, cast, now=now, limits=limits)
    state = replace(state, wanted=_wanted(state.wanted, prefixes, limits))
    moves: list[PlannedCopy] = []
    for prefix in sorted(prefixes, key=lambda its: (-its.hits_per_second, its.key)):
        move = _move(state, prefix, cast, [*cast.under_way, *moves])
        if move is not None:
            moves.append(move)
            state = _charged(state, move, cast, now=now)
    return state, moves


def _refilled(state: RebalanceState, cast: Participants, *, now: float, limits: RebalanceLimits) -> RebalanceState:
    empty, burst = ByteBudget(0.0, now), limits.burst_seconds
    clusters = {*cast.clusters.values()}
    return replace(
        state,
        ordered_at={its: at for its, at in state.ordered_at.items() if now - at < limits.repeat_seconds},
        egress={
            cluster: state.egress.get(cluster, empty).filled(limits.egress_bytes_per_second, burst, now)
            for cluster in clusters
        },
        intake={
            cluster: state.intake.get(cluster, empty).filled(limits.intake_bytes_per_second, burst, now)
            for cluster in cast.clusters
        },
    )


def _wanted(
    before: Mapping[PrefixKey, int], prefixes: Sequence[HotPrefix], limits: RebalanceLimits
) -> dict[PrefixKey, int]:
    """Return how many holders each prefix should have: up at once, down with hysteresis."""
    wanted = {}
    for prefix in prefixes:
        deserved = min(limits.max_holders, int(prefix.hits_per_second / limits.hits_per_holder_per_second))
        known = before.get(prefix.key, 1)
        keeps = prefix.hits_per_second >= known * limits.hits_per_holder_per_second * limits.fall_ratio
        wanted[prefix.key] = max(1, deserved, known if keeps else 1)
    return wanted


def _move(
    state: RebalanceState, prefix: HotPrefix, cast: Participants, moving: Sequence[PlannedCopy]
) -> PlannedCopy | None:
    """Return the next copy of one prefix, or None when it has holders enough or none can be made now."""
    coming = {its.destination for its in moving if its.key == prefix.key}
    if len(prefix.holders - cast.leaving) + len(coming) >= state.wanted[prefix.key]:
        return None
    busy = {its.destination for its in moving}
    pairs = [
        (source, destination)
        for destination in prefix.nodes - prefix.holders - cast.leaving - busy
        if _may_receive(state, prefix, destination)
        for source in prefix.holders & cast.senders
        if _may_send(state, prefix, source, destination, cast)
    ]
    if not pairs:
        return None
    source, destination = min(pairs, key=lambda pair: _preference(state, pair, cast, moving))
    return PlannedCopy(prefix.key, source, destination, prefix.num_bytes)


def _may_receive(state: RebalanceState, prefix: HotPrefix, node: AgentName) -> bool:
    intake = state.intake.get(node)
    return (prefix.key, node) not in state.ordered_at and intake is not None and prefix.num_bytes <= intake.num_bytes


def _may_send(
    state: RebalanceState, prefix: HotPrefix, source: AgentName, destination: AgentName, cast: Participants
) -> bool:
    clusters = cast.clusters
    if source not in clusters or destination not in clusters:
        return False
    link = (clusters[source], clusters[destination])
    return link not in cast.full_links and prefix.num_bytes <= state.egress[clusters[source]].num_bytes


def _preference(
    state: RebalanceState, pair: tuple[AgentName, AgentName], cast: Participants, moving: Sequence[PlannedCopy]
) -> tuple[bool, float, int, AgentName, AgentName]:
    """Within a cluster first; to whom has received least of late; from whom sends least."""
    source, destination = pair
    is_far = cast.clusters[source] != cast.clusters[destination]
    num_sending = sum(its.source == source for its in moving)
    return is_far, -state.intake[destination].num_bytes, num_sending, destination, source


def _charged(state: RebalanceState, move: PlannedCopy, cast: Participants, *, now: float) -> RebalanceState:
    cluster = cast.clusters[move.source]
    egress, intake = state.egress[cluster], state.intake[move.destination]
    return replace(
        state,
        ordered_at={**state.ordered_at, (move.key, move.destination): now},
        egress={**state.egress, cluster: replace(egress, num_bytes=egress.num_bytes - move.num_bytes)},
        intake={**state.intake, move.destination: replace(intake, num_bytes=intake.num_bytes - move.num_bytes)},
    )


def drain_order(prefixes: Collection[HotPrefix], leaving: AgentName) -> list[HotPrefix]:
    """What of a leaving node is worth moving: prefixes that are asked for and that nobody else holds, hottest first."""
    only_there = (prefix for prefix in prefixes if prefix.holders == {leaving} and prefix.hits_per_second > 0)
    return sorted(only_there, key=lambda its: (-its.hits_per_second, its.key))

"""State of the paths between clusters: rates, congestion, and the threshold of each path."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from prfaas import logs
from prfaas.index.membership import LinkFigures, Member
from prfaas.manager.state.world import World
from prfaas.scheduler.congestion import (
    Congestion,
    CongestionLimits,
    PathSample,
    Signal,
    pressures,
    raised_threshold,
    step,
)
from prfaas.scheduler.snapshot import PathState
from prfaas.scheduler.threshold import PathCost, Supply, is_abundant
from prfaas.types import AgentName, ClusterName

_log = logs.get("manager")
STEP_SECONDS = 1.0  # Agents report once a second, and changed figures twice.
LIMITS = CongestionLimits()
IDLE_RATIO = 0.01  # A link below this share of its capacity has no current round-trip time.
MEAN_SECONDS = 10.0  # Averaging time of the utilization.
# A low rate counts for planning until so long after it was measured. A link knows its rate for half a minute, and
# together this is the minute in which the threshold recovers. A link that stays slow is measured again sooner, because
# the threshold halves every 40 s.
LOW_SECONDS = 30.0
BEST_SECONDS = 300.0  # The best rate of this long counts as the rate of a healthy path.
Pair = tuple[ClusterName, ClusterName]
_Cost = Callable[[ClusterName, float], PathCost | None]
_StatesKey = tuple[frozenset[ClusterName], int, bool, _Cost]


@dataclass
class PathMonitor:
    """State of a path: all links from one cluster to another, as last reported."""

    source: ClusterName
    destination: ClusterName
    congestion: Congestion = field(default_factory=Congestion)
    pressures: Mapping[Signal, float] = field(default_factory=dict)  # Each signal as a share of its limit.
    bytes_per_second: float = 0.0
    mean_use_ratio: float = 0.0  # Share of the capacity of its known links.
    capacity_bytes_per_second: float = 0.0  # 0 while unknown.
    # Links whose rate is known; utilization and queue are theirs.
    known: list[LinkFigures] = field(default_factory=list)
    planned_bytes_per_second: float = 0.0  # Capacity at `known_at`; unknown links count as the mean.
    known_at: float = float("-inf")  # Time when any link's rate was known last.
    queued_bytes: int = 0
    num_links: int = 0
    best_bytes_per_second: float = 0.0  # Highest mean rate per link of late.
    best_at: float = float("-inf")
    is_abundant: bool = False
    is_down: bool = False
    evaluated_at: float = float("-inf")
    use_ratios: list[float] = field(default_factory=list)  # Utilization at each step since the path was weighed.
    retransmit_ratio: float = 0.0  # Highest ratio at these steps.

    def plan_with_known(self, *, now: float) -> None:
        """Update the planned rate from the links whose rates are known."""
        mean = _capacity(self.known) / len(self.known)
        self.planned_bytes_per_second, self.known_at = mean * self.num_links, now
        if mean >= self.best_bytes_per_second or now - self.best_at >= BEST_SECONDS:
            self.best_bytes_per_second, self.best_at = mean, now

    def planned(self, *, now: float, within_seconds: float) -> float:
        """Return the rate as far as it was known within `within_seconds`, else 0."""
        if now - self.known_at >= within_seconds:
            return 0.0
        if now - self.known_at < LOW_SECONDS or now - self.best_at >= within_seconds:
            return self.planned_bytes_per_second
        return max(self.planned_bytes_per_second, self.best_bytes_per_second * self.num_links)


class Paths:
    """All ordered pairs of clusters between whose live nodes links are reported."""

    def __init__(self, world: World, *, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._watched: dict[Pair, PathMonitor] = {}
        self.down: frozenset[Pair] = frozenset()  # Pairs (from, to) whose links are all down.
        # Valid until a path is weighed, appears or disappears.
        self._known_states: dict[_StatesKey, tuple[PathState, ...]] = {}

    def step(self) -> None:
        """Read the agents' latest figures, and update each path's threshold: at once for a new path, then once a
        second.

        Steps are more frequent than reports, so that each part of that second is included.
        """
        now = self._clock()
        for pair, figures in self._refresh().items():
            path = self._watched[pair]
            used = sum(link.bytes_per_second for link in path.known)
            path.use_ratios.append(used / _capacity(path.known) if path.known else 0.0)
            path.retransmit_ratio = max(path.retransmit_ratio, *(link.retransmit_ratio for link in figures))
            seconds = now - path.evaluated_at
            if seconds >= STEP_SECONDS:
                self._evaluate(pair, figures, seconds=min(seconds, MEAN_SECONDS), now=now)
                self._known_states.clear()

    def _refresh(self) -> dict[Pair, list[LinkFigures]]:
        """Return the links between clusters, after updating the paths with their figures."""
        live = self._world.live()
        links = _links_by_pair(live)
        if links.keys() != self._watched.keys():
            self._known_states.clear()
        self._watched = {pair: self._watched.get(pair) or PathMonitor(*pair) for pair in links}
        for pair, figures in links.items():
            path = self._watched[pair]
            path.bytes_per_second = sum(link.bytes_per_second for link in figures)
            path.queued_bytes = sum(link.queued_bytes for link in figures)
            path.known = [link for link in figures if link.capacity_bytes_per_second]
            # A link of unknown capacity carries at least its present rate.
            carried = sum(link.capacity_bytes_per_second or link.bytes_per_second for link in figures)
            path.capacity_bytes_per_second = carried if path.known else 0.0
            path.num_links = len(figures)
            if path.known:
                path.plan_with_known(now=self._clock())
            path.is_down = all(link.is_down for link in figures)
        self.down = frozenset(pair for pair, path in self._watched.items() if path.is_down)
        return links

    def _evaluate(self, pair: Pair, figures: list[LinkFigures], *, seconds: float, now: float) -> None:
        path, before = self._watched[pair], self._watched[pair].congestion
        path.evaluated_at = now
        path.mean_use_ratio += (fmean(path.use_ratios) - path.mean_use_ratio) * min(1.0, seconds / MEAN_SECONDS)
        capacity = _capacity(path.known)
        used = [link for link in figures if link.min_rtt_seconds and _is_used(link)]
        slowest = max(used, key=lambda link: link.rtt_seconds / link.min_rtt_seconds, default=None)
        sample = PathSample(
            bytes_per_second=path.mean_use_ratio * capacity,  # Utilization and capacity come from the same links.
            capacity_bytes_per_second=capacity,
            queued_bytes=sum(link.queued_bytes for link in path.known),
            retransmit_ratio=path.retransmit_ratio,
            rtt_seconds=slowest.rtt_seconds if slowest else 0.0,
            min_rtt_seconds=slowest.min_rtt_seconds if slowest else 0.0,
        )
        path.congestion = step(before, sample, now=now, limits=LIMITS)
        path.pressures = pressures(sample, LIMITS)
        path.use_ratios, path.retransmit_ratio = [], 0.0
        if path.congestion.multiplier != before.multiplier:
            _log.info(
                "threshold.multiplier_changed",
                source=pair[0],
                destination=pair[1],
                multiplier=round(path.congestion.multiplier, 2),
                cause=path.congestion.cause,
            )

    def views(self) -> list[PathMonitor]:
        """Return the present state of every path, by source and destination."""
        self._refresh()
        return [path for _, path in sorted(self._watched.items())]

    def _path(self, source: str, destination: str) -> PathMonitor:
        pair = ClusterName(source), ClusterName(destination)
        return self._watched.get(pair) or PathMonitor(*pair)

    def planned_bytes_per_second(self, source: str, destination: str, *, within_seconds: float) -> float:
        """Return the highest rate known within `within_seconds`, or 0 if none was known.

        Unknown links count like the known ones. A link that was slow and is no longer known counts as before.
        """
        return self._path(source, destination).planned(now=self._clock(), within_seconds=within_seconds)

    def set_supply(self, source: str, supply: Supply | None) -> None:
        """Set the rates of a cluster's links and instances. None: unknown, so that bandwidth counts as scarce."""
        self._known_states.clear()
        for (cluster, _), path in self._watched.items():
            if cluster == source:
                path.is_abundant = supply is not None and is_abundant(supply, was_abundant=path.is_abundant)

    def states(
        self,
        clusters: Iterable[ClusterName],
        *,
        threshold_tokens: int,
        always_abundant: bool,
        cost: _Cost = lambda destination, capacity: None,
    ) -> tuple[PathState, ...]:
        """Return the paths between clusters that differ from an uncongested, scarce one.

        `cost` maps a destination and a rate to the cost of a transfer.
        """
        key = (frozenset(clusters), threshold_tokens, always_abundant, cost)
        known = self._known_states.get(key)
        if known is None:
            known = self._known_states[key] = tuple(self._states(*key))
        return known

    def _states(
        self, clusters: frozenset[ClusterName], threshold_tokens: int, always_abundant: bool, cost: _Cost
    ) -> Iterator[PathState]:
        for source, destination in itertools.permutations(sorted(clusters), 2):
            path = self._path(source, destination)
            state = PathState(
                source,
                destination,
                raised_threshold(threshold_tokens, path.congestion),
                is_abundant=always_abundant or path.is_abundant,
                cost=cost(destination, path.capacity_bytes_per_second),
            )
            if state != PathState(source, destination, threshold_tokens):
                yield state


def _capacity(links: Iterable[LinkFigures]) -> float:
    return sum(link.capacity_bytes_per_second for link in links)


def _is_used(link: LinkFigures) -> bool:
    """Return whether the round-trip time is current: TCP keeps the last measurement while nothing is sent."""
    return link.queued_bytes > 0 or link.bytes_per_second > IDLE_RATIO * link.capacity_bytes_per_second


def _links_by_pair(members: Sequence[Member]) -> dict[Pair, list[LinkFigures]]:
    cluster_of: dict[AgentName, ClusterName] = {member.node.name: member.node.cluster for member in members}
    found: dict[Pair, list[LinkFigures]] = {}
    for member in members:
        for link in member.figures.links:
            destination = cluster_of.get(link.peer)
            if destination is not None and destination != member.node.cluster:
                found.setdefault((member.node.cluster, destination), []).append(link)
    return found

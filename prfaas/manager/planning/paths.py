"""The paths between clusters, watched: what they carry, whether they choke, and how t follows them."""

from __future__ import annotations

import itertools
from collections import Counter
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
STEP_SECONDS = 1.0  # agents report once a second, and what has changed twice
LIMITS = CongestionLimits()
IDLE_RATIO = 0.01  # of its capacity: a link that carries less says nothing of its round trip
MEAN_SECONDS = 10.0  # over which use is averaged
# A low rate is planned with until so long after it was known. A link knows its rate for half a minute: together that is the
# minute in which t is back. A link that stays narrow is known anew sooner, as t halves every 40 s.
LOW_SECONDS = 30.0
BEST_SECONDS = 300.0  # for which the most that a path carried is what it carries when it is well
Pair = tuple[ClusterName, ClusterName]
_Cost = Callable[[ClusterName, float], PathCost | None]
_StatesKey = tuple[frozenset[ClusterName], int, bool, _Cost]


@dataclass(frozen=True)
class PathView:
    """A path as people look at it: all links from one cluster to another, as they were reported last."""

    source: ClusterName
    destination: ClusterName
    is_down: bool
    bytes_per_second: float
    capacity_bytes_per_second: float  # 0: not known
    congestion: Congestion
    pressures: Mapping[Signal, float]  # each signal as a share of its limit


@dataclass
class _Watched:
    congestion: Congestion = field(default_factory=Congestion)
    pressures: Mapping[Signal, float] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    mean_use_ratio: float = 0.0  # of what its known links carry at most
    capacity_bytes_per_second: float = 0.0  # 0: not known
    # Its links whose own rate is known: use and queue are theirs.
    known: list[LinkFigures] = field(default_factory=list)
    planned_bytes_per_second: float = 0.0  # its capacity at `known_at`, with the mean for links that were not known
    known_at: float = float("-inf")  # when any was last
    num_links: int = 0  # that count
    is_probed: bool = False  # what was known of it last was found by a probe
    best_bytes_per_second: float = 0.0  # of one link on average, the most of it lately
    best_at: float = float("-inf")
    least_bytes_per_second: float = 0.0  # that one link carries at least, by a probe that did not find its rate
    least_at: float = float("-inf")  # when that was said last
    is_abundant: bool = False
    is_down: bool = False
    weighed_at: float = float("-inf")
    use_ratios: list[float] = field(default_factory=list)  # at each step since it was weighed
    retransmit_ratio: float = 0.0  # the highest at these steps

    def plan_with_known(self, *, now: float) -> None:
        """Some of its links' rates are known."""
        mean = _capacity(self.known) / len(self.known)
        self.planned_bytes_per_second, self.known_at = mean * self.num_links, now
        if mean >= self.best_bytes_per_second or now - self.best_at >= BEST_SECONDS:
            self.best_bytes_per_second, self.best_at = mean, now

    def hear_least(self, least_bytes_per_second: float, *, now: float) -> None:
        """A probe has shown that one of its links carries so much; 0: none has."""
        if least_bytes_per_second:
            self.least_bytes_per_second, self.least_at = least_bytes_per_second, now

    def planned(self, *, now: float, within_seconds: float) -> float:
        """What it carries, as far as that was known so lately; 0 when it was not."""
        if now - self.known_at >= within_seconds:
            return 0.0
        if now - self.known_at < LOW_SECONDS or now - self.best_at >= within_seconds:
            return self.planned_bytes_per_second
        return max(self.planned_bytes_per_second, self.best_bytes_per_second * self.num_links)


class Paths:
    """Every ordered pair of clusters between whose live nodes links are reported."""

    def __init__(self, world: World, *, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._watched: dict[Pair, _Watched] = {}
        self.down: frozenset[Pair] = frozenset()  # (from, to) whose links are all down
        self._known_states: dict[_StatesKey, tuple[PathState, ...]] = {}  # until a path is weighed, comes or goes

    def step(self) -> None:
        """Take the agents' latest figures; let t follow those of a path at once when it is new, then once a second.

        Steps come oftener than reports, so that what happened in any part of that second is weighed.
        """
        now = self._clock()
        for pair, figures in self._look().items():
            its = self._watched[pair]
            its.use_ratios.append(_use_ratio(its.known))
            its.retransmit_ratio = max(its.retransmit_ratio, *(link.retransmit_ratio for link in figures))
            seconds = now - its.weighed_at
            if seconds >= STEP_SECONDS:
                self._weigh(pair, figures, seconds=min(seconds, MEAN_SECONDS), now=now)
                self._known_states.clear()

    def _look(self) -> dict[Pair, list[LinkFigures]]:
        """The links between clusters, whose figures are those of the paths from now on."""
        live = self._world.live()
        links = _links_by_pair(live)
        num_nodes = Counter(member.node.cluster for member in live)
        if links.keys() != self._watched.keys():
            self._known_states.clear()
        self._watched = {pair: self._watched.get(pair) or _Watched() for pair in links}
        for pair, figures in links.items():
            its = self._watched[pair]
            its.bytes_per_second = sum(link.bytes_per_second for link in figures)
            its.known = [link for link in figures if link.capacity_bytes_per_second]
            its.capacity_bytes_per_second = sum(map(_carries, figures)) if its.known else 0.0
            if its.known:
                its.is_probed = all(link.is_probed for link in its.known)
            # A probe is of one link, others are there once they are used: each node has one.
            its.num_links = max(len(figures), num_nodes[pair[0]]) if its.is_probed else len(figures)
            if its.known:
                its.plan_with_known(now=self._clock())
            its.hear_least(max(link.least_bytes_per_second for link in figures), now=self._clock())
            its.is_down = all(link.is_down for link in figures)
        self.down = frozenset(pair for pair, its in self._watched.items() if its.is_down)
        return links

    def _weigh(self, pair: Pair, figures: list[LinkFigures], *, seconds: float, now: float) -> None:
        its, before = self._watched[pair], self._watched[pair].congestion
        its.weighed_at = now
        its.mean_use_ratio += (fmean(its.use_ratios) - its.mean_use_ratio) * min(1.0, seconds / MEAN_SECONDS)
        capacity = _capacity(its.known)
        used = [link for link in figures if link.min_rtt_seconds and _is_used(link)]
        slowest = max(used, key=lambda link: link.rtt_seconds / link.min_rtt_seconds, default=None)
        sample = PathSample(
            bytes_per_second=its.mean_use_ratio * capacity,  # a link comes to be known, or is forgotten, with both
            capacity_bytes_per_second=capacity,
            queued_bytes=sum(link.queued_bytes for link in its.known),
            retransmit_ratio=its.retransmit_ratio,
            rtt_seconds=slowest.rtt_seconds if slowest else 0.0,
            min_rtt_seconds=slowest.min_rtt_seconds if slowest else 0.0,
        )
        its.congestion = step(before, sample, now=now, limits=LIMITS)
        its.pressures = pressures(sample, LIMITS)
        its.use_ratios, its.retransmit_ratio = [], 0.0
        if its.congestion.multiplier != before.multiplier:
            self._tell(pair, its.congestion)

    @staticmethod
    def _tell(pair: Pair, congestion: Congestion) -> None:
        _log.info(
            "threshold.multiplied",
            source=pair[0],
            destination=pair[1],
            multiplier=round(congestion.multiplier, 2),
            cause=congestion.cause,
        )

    @property
    def pairs(self) -> frozenset[Pair]:
        """Those between which links are reported."""
        return frozenset(self._watched)

    def views(self) -> list[PathView]:
        """Every path with what is known of it at this moment, by source and destination."""
        self._look()
        return [
            PathView(
                source,
                destination,
                its.is_down,
                its.bytes_per_second,
                its.capacity_bytes_per_second,
                its.congestion,
                its.pressures,
            )
            for (source, destination), its in sorted(self._watched.items())
        ]

    def carried_bytes_per_second(self, source: ClusterName, destination: ClusterName) -> float:
        """What a path carries at present."""
        its = self._watched.get((source, destination))
        return its.bytes_per_second if its else 0.0

    def planned_bytes_per_second(self, source: str, destination: str, *, within_seconds: float) -> float:
        """What a path was known to carry at most so lately; 0 when that was not known. Those unknown count like the others.

        A link that has been slow and is no longer known counts as it was before.
        """
        its = self._watched.get((ClusterName(source), ClusterName(destination)), _Watched())
        return its.planned(now=self._clock(), within_seconds=within_seconds)

    def least_bytes_per_second(self, source: str, destination: str, *, within_seconds: float) -> float:
        """What a probe that did not find its rate has shown a path to carry so lately; 0 where none has."""
        its = self._watched.get((ClusterName(source), ClusterName(destination)), _Watched())
        return its.least_bytes_per_second if self._clock() - its.least_at < within_seconds else 0.0

    def is_probed(self, source: str, destination: str) -> bool:
        """Whether what is known of a path was found by a probe, of one of its links."""
        return self._watched.get((ClusterName(source), ClusterName(destination)), _Watched()).is_probed

    def set_supply(self, source: str, supply: Supply | None) -> None:
        """What a cluster's links take and its instances make; None: not known, and its bandwidth counts as scarce."""
        self._known_states.clear()
        for (cluster, _), its in self._watched.items():
            if cluster == source:
                its.is_abundant = supply is not None and is_abundant(supply, was_abundant=its.is_abundant)

    def states(
        self,
        clusters: Iterable[ClusterName],
        *,
        threshold_tokens: int,
        always_abundant: bool,
        cost: _Cost = lambda destination, capacity: None,
    ) -> tuple[PathState, ...]:
        """The paths between these clusters that differ from a calm, scarce one. `cost` is of a destination and a rate."""
        key = (frozenset(clusters), threshold_tokens, always_abundant, cost)
        known = self._known_states.get(key)
        if known is None:
            known = self._known_states[key] = tuple(self._states(*key))
        return known

    def _states(
        self,
        clusters: frozenset[ClusterName],
        threshold_tokens: int,
        always_abundant: bool,
        cost: _Cost,
    ) -> Iterator[PathState]:
        for source, destination in itertools.permutations(sorted(clusters), 2):
            its = self._watched.get((source, destination), _Watched())
            state = PathState(
                source,
                destination,
                raised_threshold(threshold_tokens, its.congestion),
                is_abundant=always_abundant or its.is_abundant,
                cost=cost(destination, its.capacity_bytes_per_second),
            )
            if state != PathState(source, destination, threshold_tokens):
                yield state


def _carries(link: LinkFigures) -> float:
    """What a link carries at most, or where that is not known at present."""
    return link.capacity_bytes_per_second or link.bytes_per_second


def _capacity(links: Iterable[LinkFigures]) -> float:
    return sum(link.capacity_bytes_per_second for link in links)


def _use_ratio(known: Sequence[LinkFigures]) -> float:
    return sum(link.bytes_per_second for link in known) / _capacity(known) if known else 0.0


def _is_used(link: LinkFigures) -> bool:
    """Whether its round trip is of now: TCP keeps the last one it measured while nothing is sent."""
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

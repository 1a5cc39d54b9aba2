"""Live data of the dashboard: an hour of one-second samples, and a document twice a second for all watchers."""

import asyncio
import itertools
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from prfaas.manager.dashboard.egress_bill import EgressBill
from prfaas.manager.dashboard.overview import FIRST_FULL, Overview
from prfaas.manager.planning.paths import LIMITS

SAMPLES = 3600  # An hour. Charts need little of a sample, so the rest is kept until the next sample only.
MAX_CHANGES = 200
MAX_SENT_CHANGES = 100  # The page gets them every two seconds.
NUM_STEPS = 120  # Points of a chart, whatever its time range.


@dataclass(frozen=True)
class PathPoint:
    """A path between two clusters at one moment."""

    bytes_per_second: float
    capacity_bytes_per_second: float
    threshold_tokens: int
    multiplier: float
    reason: str  # Of the last rise of t.
    is_down: bool


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at: float  # Unix time in seconds.
    threshold_tokens: int
    plan_version: int
    plan_limit: str
    plan_cause: str
    paths: Mapping[str, PathPoint]  # Keyed by "source → destination".
    roles: Mapping[str, str]  # Keyed by instance.
    draining: Mapping[str, str]
    nodes: Mapping[str, str]  # Live nodes with their cluster.
    silent: frozenset[str] = frozenset()  # Instances that are silent, or whose agent is.
    epochs: Mapping[str, int] = field(default_factory=dict)  # Of live nodes; a restart brings a later epoch.
    leaving: frozenset[str] = frozenset()  # Nodes that drain.
    is_stale: bool = False  # The record does not answer.


@dataclass(frozen=True)
class Change:
    """Change between two moments, with its reason. If it moved t, `thresholds` are those before and after it."""

    at: float
    kind: str  # A key of KINDS in static/timeline.js. "calm" is the end of a congestion, after all its steps.
    subject: str
    detail: str
    thresholds: tuple[int, int] | None = None


class _Drawn(NamedTuple):
    """Part of a sample that charts draw."""

    at: float
    threshold_tokens: int
    paths: Mapping[str, tuple[float, float, int]]  # Rate, capacity and t, keyed by "source → destination".


class History:
    """Latest samples and changes."""

    def __init__(self) -> None:
        self._latest: Sample | None = None
        self._drawn: deque[_Drawn] = deque(maxlen=SAMPLES)
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    def add(self, sample: Sample) -> None:
        if self._latest:
            self._changes.extend(changes(self._latest, sample))
        self._latest = sample
        paths = {
            sys.intern(name): (path.bytes_per_second, path.capacity_bytes_per_second, path.threshold_tokens)
            for name, path in sample.paths.items()
        }
        self._drawn.append(_Drawn(sample.at, sample.threshold_tokens, paths))

    def steps(self, since: float, until: float, *, num_steps: int) -> dict[str, Any]:
        """Return t and the paths in equal parts of a time: mean rates, and the rest at their ends. None: no sample."""
        steps: list[list[_Drawn]] = [[] for _ in range(num_steps)]
        for sample in self._drawn:
            if since <= sample.at < until:
                steps[min(num_steps - 1, int((sample.at - since) / (until - since) * num_steps))].append(sample)
        names = sorted({name for samples in steps for sample in samples for name in sample.paths})
        return {
            "threshold_tokens": [samples[-1].threshold_tokens if samples else None for samples in steps],
            "paths": {
                name: [_path_step([s.paths[name] for s in samples if name in s.paths]) for samples in steps]
                for name in names
            },
        }

    def changes(self) -> list[Change]:
        """Return the changes, newest first."""
        return list(reversed(self._changes))


def _path_step(points: Sequence[tuple[float, float, int]]) -> tuple[float, float, int] | None:
    """Return mean rate, last capacity (0: unknown) and last t of a path."""
    if not points:
        return None
    rate, (_, capacity, threshold_tokens) = fmean(rate for rate, _, _ in points), points[-1]
    return rate, max(rate, capacity) if capacity else 0.0, threshold_tokens


def changes(before: Sample, now: Sample) -> Iterator[Change]:
    """Yield the differences between two moments."""
    if (now.plan_limit, now.threshold_tokens) != (before.plan_limit, before.threshold_tokens):
        first_full = FIRST_FULL.get(now.plan_limit, now.plan_limit)
        detail = f"{now.plan_cause}; with more load {first_full} fills first"
        thresholds = before.threshold_tokens, now.threshold_tokens
        yield Change(now.at, "plan", f"plan {now.plan_version}", detail, thresholds)
    for name, path in before.paths.items():
        later = now.paths.get(name) or _unused(path, now.threshold_tokens)
        yield from _path_changes(now.at, name, path, later, planned_tokens=now.threshold_tokens)
    yield from _role_changes(before, now)
    for name in sorted(now.silent - before.silent):
        yield Change(now.at, "silent", name, "gets no new requests")
    for name in sorted(before.silent - now.silent):
        yield Change(now.at, "answers", name, _again(name in now.roles))
    yield from _node_changes(before, now)
    if now.is_stale != before.is_stale:
        kind = "record_lost" if now.is_stale else "record_found"
        yield Change(now.at, kind, "Redis", "no answer" if now.is_stale else "answers again")


def _node_changes(before: Sample, now: Sample) -> Iterator[Change]:
    for name in sorted(now.epochs.keys() & before.epochs.keys()):
        if now.epochs[name] != before.epochs[name]:
            yield Change(now.at, "node_restarted", name, f"in {now.nodes[name]}")
    for name in sorted(now.leaving - before.leaving):
        yield Change(now.at, "node_draining", name, "gets no new requests")
    for name in sorted(before.leaving - now.leaving):
        yield Change(now.at, "node_drained", name, _again(name in now.nodes))
    for name in now.nodes.keys() - before.nodes.keys():
        yield Change(now.at, "node_joined", name, f"in {now.nodes[name]}")
    for name in before.nodes.keys() - now.nodes.keys():
        yield Change(now.at, "node_left", name, f"from {before.nodes[name]}")


def _again(is_known: bool) -> str:
    return "gets requests again" if is_known else "its node has left"


def _unused(path: PathPoint, threshold_tokens: int) -> PathPoint:
    """Return a path whose nodes have left."""
    return replace(path, multiplier=1.0, threshold_tokens=threshold_tokens, is_down=False)


def _path_changes(at: float, name: str, before: PathPoint, now: PathPoint, *, planned_tokens: int) -> Iterator[Change]:
    if now.multiplier != before.multiplier:
        eased = f"link below {100 * LIMITS.calm_ratio:g} % of every limit"
        cause = now.reason if now.multiplier > before.multiplier else eased
        # A plan may have moved t at the same moment, which is a change of its own.
        thresholds = round(planned_tokens * before.multiplier), now.threshold_tokens
        yield Change(at, "congestion" if now.multiplier > 1 else "calm", name, cause, thresholds)
    if now.is_down != before.is_down:
        yield Change(
            at, "link_down" if now.is_down else "link_up", name, "no connection" if now.is_down else "connected again"
        )


def _role_changes(before: Sample, now: Sample) -> Iterator[Change]:
    for instance, role in now.draining.items():
        if before.draining.get(instance) != role:
            yield Change(now.at, "role_draining", instance, f"will become {role}")
    for instance, role in now.roles.items():
        if before.roles.get(instance, role) != role:
            yield Change(now.at, "role_changed", instance, f"{before.roles[instance]} → {role}")


TICK_SECONDS = 0.5  # Agents report changes as often, so a page shows them within two seconds.
TICKS_A_SAMPLE = 2
MAX_WATCHERS = 64  # Each watcher is a connection, with a document of tens of KB twice a second.


class Feed:
    """Samples while `run` runs. Slow watchers miss documents, but never the latest."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._history = History()
        self._bill = EgressBill(overview.planner.egress_prices() if overview.planner else {})
        self._event = b""
        self._number = 0
        self._num_watchers = 0
        self._is_closed = False
        self._ticked = asyncio.Condition()

    async def run(self) -> None:
        """Sample until cancelled."""
        for tick in itertools.count():
            if tick % TICKS_A_SAMPLE == 0:
                self._take_sample()
            if self._num_watchers:
                await self._publish()
            await asyncio.sleep(TICK_SECONDS)

    async def _publish(self) -> None:
        async with self._ticked:
            self._event = self._now()
            self._number += 1
            self._ticked.notify_all()

    def enter(self) -> bool:
        """Add a watcher, and return False if there are too many. `leave` removes it."""
        if self._num_watchers >= MAX_WATCHERS:
            return False
        self._num_watchers += 1
        return True

    def leave(self) -> None:
        """Remove a watcher."""
        self._num_watchers -= 1

    async def close(self) -> None:
        """End all event streams."""
        self._is_closed = True
        async with self._ticked:
            self._ticked.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until `close`: the present state at once and at each tick."""
        yield self._now()
        while await self._ticks():
            yield self._event

    async def _ticks(self) -> bool:
        """Wait for the next tick, and return False if there is none."""
        async with self._ticked:
            number = self._number
            await self._ticked.wait_for(lambda: self._number != number or self._is_closed)
        return not self._is_closed

    def _now(self) -> bytes:
        return _event("now", self._overview.document() | {"egress": self._bill.document()})

    def figures(self, seconds: float, filters: Mapping[str, str]) -> dict[str, Any]:
        """Return figures and charts of the last `seconds`, of the requests that pass the filters, and latest changes."""
        overview, until = self._overview, self._overview.wall_clock()
        since = until - seconds
        actions = [Change(*action) for action in overview.actions]
        changes = sorted([*self._history.changes(), *actions], key=lambda change: -change.at)
        return {
            "since": since,
            "until": until,
            "num_steps": NUM_STEPS,
            "requests": overview.outcomes.record.figures(since, until, num_steps=NUM_STEPS, filters=filters),
            "history": self._history.steps(since, until, num_steps=NUM_STEPS),
            "cache": overview.cache_hits.figures(since, until),
            "changes": [asdict(change) for change in changes[:MAX_SENT_CHANGES]],
        }

    def _take_sample(self) -> None:
        overview = self._overview
        plan, live, paths = overview.world.plan, overview.world.live(), list(overview.path_records())
        rates: dict[str, float] = {}
        for path in paths:
            rates[path["source"]] = rates.get(path["source"], 0.0) + path["bytes_per_second"]
        self._bill.add(overview.wall_clock(), rates)
        self._history.add(
            Sample(
                at=overview.wall_clock(),
                threshold_tokens=overview.routing.threshold_tokens,
                plan_version=plan.version if plan else 0,
                plan_limit=plan.limit if plan else "",
                plan_cause=plan.cause if plan else "",
                paths={_name(path): _path_sample(path) for path in paths},
                roles={engine.instance: engine.role for member in live for engine in member.node.engines},
                draining=dict(plan.draining.items()) if plan else {},
                nodes={member.node.name: member.node.cluster for member in live},
                silent=overview.world.silent,
                epochs={member.node.name: member.node.epoch for member in live},
                leaving=overview.world.leaving,
                is_stale=overview.is_stale(),
            )
        )


def _name(path: dict[str, Any]) -> str:
    return f"{path['source']} → {path['destination']}"


def _path_sample(path: dict[str, Any]) -> PathPoint:
    names = ("bytes_per_second", "capacity_bytes_per_second", "threshold_tokens", "multiplier", "reason", "is_down")
    return PathPoint(**{name: path[name] for name in names})


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()

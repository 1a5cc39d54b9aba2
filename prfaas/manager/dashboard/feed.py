"""Live data of the dashboard: a history of one-second samples, and a document twice a second for all watchers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prfaas.manager.dashboard.overview import Overview, decision_counts
from prfaas.manager.routing.outcomes import outcome_counts, ttft_totals

SAMPLES = 900  # A quarter of an hour, about 1 KB per sample with a few paths.
MAX_CHANGES = 200

ChangeKind = Literal[
    "plan",
    "congestion",
    "calm",
    "link_down",
    "link_up",
    "role_draining",
    "role_changed",
    "node_joined",
    "node_left",
    "silent",
    "answers",
]


@dataclass(frozen=True)
class PathPoint:
    """A path between two clusters at one moment."""

    bytes_per_second: float
    capacity_bytes_per_second: float
    threshold_tokens: int
    multiplier: float
    cause: str | None
    is_down: bool


@dataclass(frozen=True)
class Sample:
    """One moment. `counts`, `answered` and `ttft` only grow while the manager runs."""

    at: float  # Unix time in seconds.
    threshold_tokens: int
    plan_version: int
    plan_limit: str
    paths: Mapping[str, PathPoint]  # Keyed by "source → destination".
    counts: Mapping[str, float]  # Routed requests by "route/reason".
    answered: Mapping[str, float]  # Reported requests by "route/reason/outcome".
    # By route: seconds of each phase, `sum` of TTFT, and `count` of first tokens.
    ttft: Mapping[str, Mapping[str, float]]
    roles: Mapping[str, str]  # Keyed by instance.
    draining: Mapping[str, str]
    nodes: Mapping[str, str]  # Live nodes with their cluster.
    silent: frozenset[str] = frozenset()  # Instances that are silent, or whose agent is.

    def drawn(self) -> dict[str, Any]:
        """Return the part that the charts need."""
        paths = {
            name: [path.bytes_per_second, path.capacity_bytes_per_second, path.threshold_tokens]
            for name, path in self.paths.items()
        }
        return {
            "at": self.at,
            "threshold_tokens": self.threshold_tokens,
            "paths": paths,
            "counts": self.counts,
            "answered": self.answered,
            "ttft": self.ttft,
        }


@dataclass(frozen=True)
class Change:
    """Change between two moments, with its reason."""

    at: float
    kind: ChangeKind
    subject: str
    detail: str


class History:
    """Latest samples and changes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    def add(self, sample: Sample) -> None:
        if self._samples:
            self._changes.extend(changes(self._samples[-1], sample))
        self._samples.append(sample)

    def drawn(self) -> list[dict[str, Any]]:
        """Return the drawn part of every sample, oldest first."""
        return [sample.drawn() for sample in self._samples]

    def latest(self) -> dict[str, Any] | None:
        return self._samples[-1].drawn() if self._samples else None

    def changes(self) -> list[dict[str, Any]]:
        """Return the changes, newest first."""
        return [asdict(change) for change in reversed(self._changes)]


def changes(before: Sample, now: Sample) -> Iterator[Change]:
    """Yield the differences between two moments."""
    if now.plan_version != before.plan_version:
        detail = f"threshold {before.threshold_tokens:,} → {now.threshold_tokens:,} tokens, limited by {now.plan_limit}"
        yield Change(now.at, "plan", f"plan {now.plan_version}", detail)
    for name, path in now.paths.items():
        if name in before.paths:
            yield from _path_changes(now.at, name, before.paths[name], path)
    yield from _role_changes(before, now)
    for name in sorted(now.silent - before.silent):
        yield Change(now.at, "silent", name, "gets no new requests")
    for name in sorted((before.silent - now.silent) & now.roles.keys()):
        yield Change(now.at, "answers", name, "gets requests again")
    for name in now.nodes.keys() - before.nodes.keys():
        yield Change(now.at, "node_joined", name, f"in {now.nodes[name]}")
    for name in before.nodes.keys() - now.nodes.keys():
        yield Change(now.at, "node_left", name, f"from {before.nodes[name]}")


def _path_changes(at: float, name: str, before: PathPoint, now: PathPoint) -> Iterator[Change]:
    words = f"threshold {before.threshold_tokens:,} → {now.threshold_tokens:,} tokens"
    if now.multiplier > before.multiplier:
        yield Change(at, "congestion", name, f"{words}: {now.cause}")
    elif now.multiplier < before.multiplier:
        yield Change(at, "calm", name, words)
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
        self._event = b""
        self._number = 0
        self._num_watchers = 0
        self._is_closed = False
        self._ticked = asyncio.Condition()

    async def run(self) -> None:
        """Sample until cancelled."""
        for tick in itertools.count():
            if tick % TICKS_A_SAMPLE == 0:
                self._history.add(self._sample())
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
        """Yield server-sent events until `close`: `history` once, then `now` at once and at each tick."""
        yield _event("history", {"samples": self._history.drawn()})
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
        document = self._overview.document()
        return _event("now", document | {"sample": self._history.latest(), "changes": self._history.changes()})

    def _sample(self) -> Sample:
        overview = self._overview
        plan, live = overview.world.plan, overview.world.live()
        return Sample(
            at=overview.wall_clock(),
            threshold_tokens=overview.routing.threshold_tokens,
            plan_version=plan.version if plan else 0,
            plan_limit=plan.limit if plan else "",
            paths={_name(path): _path_sample(path) for path in overview.path_records()},
            counts={f"{count['route']}/{count['reason']}": count["count"] for count in decision_counts()},
            answered={
                f"{count['route']}/{count['reason']}/{count['outcome']}": count["count"] for count in outcome_counts()
            },
            ttft=ttft_totals(),
            roles={engine.instance: engine.role for member in live for engine in member.node.engines},
            draining=dict(plan.draining.items()) if plan else {},
            nodes={member.node.name: member.node.cluster for member in live},
            silent=overview.world.silent,
        )


def _name(path: dict[str, Any]) -> str:
    return f"{path['source']} → {path['destination']}"


def _path_sample(path: dict[str, Any]) -> PathPoint:
    names = ("bytes_per_second", "capacity_bytes_per_second", "threshold_tokens", "multiplier", "cause", "is_down")
    return PathPoint(**{name: path[name] for name in names})


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()

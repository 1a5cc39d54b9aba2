"""What has been, for as long as the dashboard looks back: samples of each second, and what changed between them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

SAMPLES = 900  # a quarter of an hour, about 1 KB each with a handful of paths
MAX_CHANGES = 200

ChangeKind = Literal[
    "plan", "congestion", "calm", "link_down", "link_up", "role_draining", "role_changed", "node_joined", "node_left"
]


@dataclass(frozen=True)
class PathSample:
    """A path between two clusters at one moment."""

    bytes_per_second: float
    capacity_bytes_per_second: float
    threshold_tokens: int
    multiplier: float
    cause: str | None
    is_down: bool


@dataclass(frozen=True)
class Sample:
    """One moment. `counts`, `answered` and `ttft` only grow while the manager lives."""

    at: float  # seconds since 1970
    threshold_tokens: int
    plan_version: int
    plan_limit: str
    paths: Mapping[str, PathSample]  # by "source → destination"
    counts: Mapping[str, float]  # requests routed, by "route/reason"
    answered: Mapping[str, float]  # requests that routers answered, by "route/reason/outcome"
    ttft: Mapping[str, Mapping[str, float]]  # by route: seconds of each phase, of all (sum), first tokens (count)
    roles: Mapping[str, str]  # by instance
    draining: Mapping[str, str]
    nodes: Mapping[str, str]  # live ones, with their cluster

    def drawn(self) -> dict[str, Any]:
        """What the charts need of it."""
        paths = {
            name: [its.bytes_per_second, its.capacity_bytes_per_second, its.threshold_tokens]
            for name, its in self.paths.items()
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
    """Something that became different, and why."""

    at: float
    kind: ChangeKind
    subject: str
    detail: str


class History:
    """Keeps the latest samples and changes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    def add(self, sample: Sample) -> None:
        if self._samples:
            self._changes.extend(changes(self._samples[-1], sample))
        self._samples.append(sample)

    def drawn(self) -> list[dict[str, Any]]:
        """Every sample, oldest first."""
        return [sample.drawn() for sample in self._samples]

    def latest(self) -> dict[str, Any] | None:
        return self._samples[-1].drawn() if self._samples else None

    def changes(self) -> list[dict[str, Any]]:
        """Newest first."""
        return [asdict(change) for change in reversed(self._changes)]


def changes(before: Sample, now: Sample) -> Iterator[Change]:
    """What differs between two moments."""
    if now.plan_version != before.plan_version:
        detail = f"t {before.threshold_tokens:,} → {now.threshold_tokens:,} tokens, limited by {now.plan_limit}"
        yield Change(now.at, "plan", f"plan {now.plan_version}", detail)
    for name, its in now.paths.items():
        if name in before.paths:
            yield from _path_changes(now.at, name, before.paths[name], its)
    yield from _role_changes(before, now)
    for name in now.nodes.keys() - before.nodes.keys():
        yield Change(now.at, "node_joined", name, f"in {now.nodes[name]}")
    for name in before.nodes.keys() - now.nodes.keys():
        yield Change(now.at, "node_left", name, f"from {before.nodes[name]}")


def _path_changes(at: float, name: str, before: PathSample, now: PathSample) -> Iterator[Change]:
    words = f"its t {before.threshold_tokens:,} → {now.threshold_tokens:,} tokens"
    if now.multiplier > before.multiplier:
        yield Change(at, "congestion", name, f"{words}: {now.cause}")
    elif now.multiplier < before.multiplier:
        yield Change(at, "calm", name, words)
    if now.is_down != before.is_down:
        yield Change(
            at, "link_down" if now.is_down else "link_up", name, "nobody answers" if now.is_down else "answers"
        )


def _role_changes(before: Sample, now: Sample) -> Iterator[Change]:
    for instance, role in now.draining.items():
        if before.draining.get(instance) != role:
            yield Change(now.at, "role_draining", instance, f"is to become {role}")
    for instance, role in now.roles.items():
        if before.roles.get(instance, role) != role:
            yield Change(now.at, "role_changed", instance, f"{before.roles[instance]} → {role}")

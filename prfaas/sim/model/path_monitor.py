"""What the scheduler knows of the links between clusters: t of each as congestion moves it, and which are down."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

from prfaas.scheduler.congestion import Congestion, CongestionLimits, PathSample, raised_threshold, step
from prfaas.scheduler.snapshot import PathState
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.network import Egress
from prfaas.transport.congestion.rate_estimator import RateEstimate
from prfaas.types import ClusterName

_EVERY_SECONDS, _MEAN_OVER = 1.0, 10  # as managers sample links: rates are means over ten seconds
_LIMITS = CongestionLimits()
Pair = tuple[ClusterName, ClusterName]


class PathMonitor:
    """Samples the egress of each cluster once a second, as managers do, and lets `scheduler.congestion` move t.

    `fields` are those of a `Snapshot` that say it. While no request is under way, nothing is queued and no t is raised,
    nobody samples; `wake` begins again, and the seconds asleep count as such in which nothing was sent.
    """

    def __init__(
        self,
        timeline: Timeline,
        egress: Mapping[ClusterName, Egress],
        targets: Sequence[ClusterName],
        *,
        under_way: Sized,
        threshold_tokens: int,
        loss_ratio: float = 0.0,
    ) -> None:
        self.fields: dict[str, Any] = {}
        self.max_multiplier = 1.0
        self._timeline, self._egress, self._targets, self._under_way = timeline, egress, targets, under_way
        self._threshold_tokens, self._loss_ratio = threshold_tokens, loss_ratio
        self._states = {name: Congestion() for name in egress}
        self._sent = {name: deque([0.0], maxlen=_MEAN_OVER + 1) for name in egress}
        self._beliefs = dict.fromkeys(egress, RateEstimate())
        self._down: frozenset[Pair] = frozenset()
        self._asleep_since: float | None = 0.0

    def wake(self) -> None:
        """A request is under way."""
        if self._asleep_since is not None:
            num_missed = min(int((self._timeline.now - self._asleep_since) / _EVERY_SECONDS), _MEAN_OVER)
            for name, egress in self._egress.items():
                self._sent[name].extend([egress.sent.total] * num_missed)
            self._asleep_since = None
            self._timeline.at(self._timeline.now + _EVERY_SECONDS, self._sample, None)

    def set_down(self, source: ClusterName, *, is_down: bool) -> None:
        """All links of a cluster are down, or up again, as far as the scheduler knows."""
        its = {(source, target) for target in self._targets}
        self._down = self._down | its if is_down else self._down - its
        self._tell()

    def _sample(self, _: None) -> None:
        for name, egress in self._egress.items():
            queued, sent = egress.queued_bytes(), self._sent[name]
            sent.append(egress.sent.total)
            rate = (sent[-1] - sent[0]) / (len(sent) - 1) / _EVERY_SECONDS
            sample = PathSample(rate, self._known_capacity(name, queued), int(queued), self._loss_ratio, 0.0, 0.0)
            self._states[name] = step(self._states[name], sample, now=self._timeline.now, limits=_LIMITS)
            self.max_multiplier = max(self.max_multiplier, self._states[name].multiplier)
        self._tell()
        busy = any(its.queued_bytes() for its in self._egress.values())
        raised = any(state.multiplier > 1.0 for state in self._states.values())
        if self._under_way or busy or raised:
            self._timeline.at(self._timeline.now + _EVERY_SECONDS, self._sample, None)
        else:
            self._asleep_since = self._timeline.now

    def _known_capacity(self, name: ClusterName, queued: float) -> float:
        """What agents would say of the link, who learn its rate only while it is busy. 0: unknown."""
        rate, now = self._egress[name].bytes_per_second, self._timeline.now
        if queued and rate and math.isfinite(rate):
            self._beliefs[name] = RateEstimate(rate, now)
        return self._beliefs[name].at(now)

    def _tell(self) -> None:
        self.fields = {"links_down": self._down, "paths": tuple(self._raised())}

    def _raised(self) -> Iterator[PathState]:
        """Yield the paths whose t is another than the deployment's."""
        for name, state in self._states.items():
            if state.multiplier > 1.0:
                for target in self._targets:
                    yield PathState(name, target, raised_threshold(self._threshold_tokens, state))

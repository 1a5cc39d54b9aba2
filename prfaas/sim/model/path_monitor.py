"""Scheduler's view of the paths between clusters: the threshold of each as congestion moves it, and paths that are down."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prfaas.scheduler.congestion import Congestion, CongestionLimits, PathSample, raised_threshold, step
from prfaas.scheduler.snapshot import PathState
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.network import Egress
from prfaas.transport.congestion.rate_estimator import RateEstimate
from prfaas.types import ClusterName

# Managers sample links at this interval, and take means over ten seconds.
_EVERY_SECONDS, _MEAN_OVER = 1.0, 10
_LIMITS = CongestionLimits()
Pair = tuple[ClusterName, ClusterName]


class EgressMonitor:
    """Simulated path monitor: samples each cluster's egress once a second, and `scheduler.congestion` moves t.

    `fields` has the corresponding fields of a `Snapshot`. Sampling ends when nothing else is left to happen.
    """

    def __init__(
        self,
        timeline: Timeline,
        egress: Mapping[ClusterName, Egress],
        targets: Sequence[ClusterName],
        *,
        threshold_tokens: int,
    ) -> None:
        self.fields: dict[str, Any] = {}
        self._timeline, self._egress, self._targets = timeline, egress, targets
        self._threshold_tokens = threshold_tokens
        self._states = {name: Congestion() for name in egress}
        self._sent = {name: deque([0.0], maxlen=_MEAN_OVER + 1) for name in egress}
        self._estimates = dict.fromkeys(egress, RateEstimate())
        self._down: frozenset[Pair] = frozenset()

    def start(self) -> None:
        """Begin to sample."""
        self._timeline.every(_EVERY_SECONDS, self._sample)

    def set_down(self, source: ClusterName, *, is_down: bool) -> None:
        """Note that all links of a cluster are down, or up again."""
        paths = {(source, target) for target in self._targets}
        self._down = self._down | paths if is_down else self._down - paths
        self._update_fields()

    def _sample(self) -> None:
        for name, egress in self._egress.items():
            queued, sent = egress.queued_bytes(), self._sent[name]
            sent.append(egress.sent.total)
            rate = (sent[-1] - sent[0]) / (len(sent) - 1) / _EVERY_SECONDS
            sample = PathSample(rate, self._known_capacity(name, queued), int(queued), 0.0, 0.0, 0.0)
            self._states[name] = step(self._states[name], sample, now=self._timeline.now, limits=_LIMITS)
        self._update_fields()

    def _known_capacity(self, name: ClusterName, queued: float) -> float:
        """Return the rate that agents would report, since they learn it only while the link is busy; 0 if unknown."""
        rate, now = self._egress[name].bytes_per_second, self._timeline.now
        if queued and rate and math.isfinite(rate):
            self._estimates[name] = RateEstimate(rate, now)
        return self._estimates[name].at(now)

    def _update_fields(self) -> None:
        self.fields = {"links_down": self._down, "paths": tuple(self._raised())}

    def _raised(self) -> Iterator[PathState]:
        """Yield the paths with a raised threshold."""
        for name, state in self._states.items():
            if state.multiplier > 1.0:
                for target in self._targets:
                    yield PathState(name, target, raised_threshold(self._threshold_tokens, state))

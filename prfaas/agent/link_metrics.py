"""This agent's links in numbers, for the metrics: by peer, once a second."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable

from prometheus_client import Gauge

from prfaas import metrics
from prfaas.transport.link_meter import CongestionReason, LinkLimit
from prfaas.transport.link_state import LinkState

REFRESH_SECONDS = 1.0
_WORDS: dict[Gauge, tuple[str, ...]] = {
    metrics.LINK_CONGESTED: typing.get_args(CongestionReason),
    metrics.LINK_LIMITED: typing.get_args(LinkLimit),
}
_NUMBERS: dict[Gauge, Callable[[LinkState], float]] = {
    metrics.LINK_QUEUE_SECONDS: lambda its: its.queue_seconds,
    metrics.LINK_QUEUED_BYTES: lambda its: its.queued_bytes,
    metrics.LINK_UNSENT_BYTES: lambda its: its.unsent_bytes,
    metrics.LINK_UNACKNOWLEDGED_BYTES: lambda its: its.unacknowledged_bytes,
    metrics.LINK_RTT_SECONDS: lambda its: its.rtt_seconds,
    metrics.LINK_RTT_INFLATION: lambda its: its.rtt_seconds / its.min_rtt_seconds if its.min_rtt_seconds else 0.0,
    metrics.LINK_RETRANSMITS: lambda its: its.resent_ratio,
    metrics.LINK_UTILIZATION: lambda its: its.utilization_ratio,
    metrics.LINK_ACHIEVABLE: lambda its: its.achievable_bytes_per_second,
}


class LinkMetrics:
    """Sets the gauges of links, and takes away those of links that have gone."""

    def __init__(self, states: Callable[[], Iterable[LinkState]]) -> None:
        self._states = states
        self._refreshed_at = float("-inf")
        self._peers: set[str] = set()

    def refresh(self, now: float) -> None:
        """Set them when they are due; `now` is monotonic seconds."""
        if now - self._refreshed_at < REFRESH_SECONDS:
            return
        self._refreshed_at = now
        states = sorted(self._states(), key=lambda its: its.num_connections)
        metrics.CONNECTIONS.labels(direction="out").set(sum(its.num_connections for its in states))
        by_peer = {its.peer: its for its in states}  # of a peer that has moved, the link that is in use
        for peer in self._peers - set(by_peer):
            _forget(peer)
        for peer, state in by_peer.items():
            _show(peer, state)
        self._peers = set(by_peer)


def _show(peer: str, state: LinkState) -> None:
    for gauge, number in _NUMBERS.items():
        gauge.labels(peer=peer).set(number(state))
    for gauge, words in _WORDS.items():
        for word in words:
            gauge.labels(peer=peer, reason=word).set(word in (state.congestion, state.limit))


def _forget(peer: str) -> None:
    for gauge in _NUMBERS:
        gauge.remove(peer)
    for gauge, words in _WORDS.items():
        for word in words:
            gauge.remove(peer, word)

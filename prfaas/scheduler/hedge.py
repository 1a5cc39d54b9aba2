"""Hedged recompute: whether a decode engine goes on waiting for a prompt's KV, or computes the prompt itself. Pure.

The decision compares two durations: until the KV is complete, as predicted from the transfer's progress, and of a local
prefill. An engine cannot do both for one request, so the transfer is cancelled when it computes.
"""

from dataclasses import dataclass
from typing import Literal

# A local prefill must be so much shorter than the predicted wait: it costs the decode engine work that was offloaded.
MARGIN_RATIO = 0.25
# Time for which a transfer that brings nothing is expected to bring nothing, as a multiple of its present pause.
# With the margin, an engine gives up after a pause of 0.31 local prefills. So a link that fails in the last moment
# adds at most 1.31 local prefills to the time to the first token.
PAUSE_FACTOR = 4.0
# Shorter pauses occur in working transfers: retransmissions, and other requests in the prefill engine's steps.
MIN_PAUSE_SECONDS = 0.3
# The rate since the first byte says little before.
MIN_SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class InboundProgress:
    """Snapshot of a transfer that has not arrived.

    Attributes:
        waited_seconds: Time since the engine claimed the transfer.
        total_bytes: Bytes to receive, as far as known.
        missing_bytes: Bytes that have not arrived.
        flowing_seconds: Time since the first byte; 0 before.
        paused_seconds: Time since the latest byte, or since the claim.
        is_open: The sender has opened the transfer.
    """

    waited_seconds: float
    total_bytes: float = 0
    missing_bytes: float = 0
    flowing_seconds: float = 0.0
    paused_seconds: float = 0.0
    is_open: bool = True


@dataclass(frozen=True)
class HedgeDecision:
    """Decision with the durations that it compares, in seconds.

    Reasons: `no_hurry` (the request has waited less than `min_wait_seconds`), `arrives_first`, `not_begun` (no byte has
    come), `paused` (no byte has come lately), `slow`.
    """

    action: Literal["wait", "recompute"]
    reason: Literal["no_hurry", "arrives_first", "not_begun", "paused", "slow"]
    remaining_seconds: float
    local_seconds: float


def remaining_seconds(progress: InboundProgress) -> float:
    """Return the predicted time until all bytes have arrived.

    A transfer that is not open counts as paused, since senders open it as soon as their engine has the request. An open
    one without bytes is expected to wait as long again as it has waited. Later, the mean rate since the first byte holds,
    unless the transfer pauses.
    """
    if not progress.is_open:
        return PAUSE_FACTOR * progress.waited_seconds
    arrived_bytes = progress.total_bytes - progress.missing_bytes
    if not arrived_bytes:
        return progress.waited_seconds
    at_rate = progress.missing_bytes * progress.flowing_seconds / arrived_bytes
    if progress.flowing_seconds < MIN_SAMPLE_SECONDS:
        at_rate = 0.0
    is_paused = progress.paused_seconds >= MIN_PAUSE_SECONDS
    return max(at_rate, PAUSE_FACTOR * progress.paused_seconds) if is_paused else at_rate


def decide(progress: InboundProgress, *, local_seconds: float, min_wait_seconds: float) -> HedgeDecision:
    """Return whether to wait for a transfer or to compute the prompt.

    Args:
        progress: The transfer.
        local_seconds: Time until a local prefill would end, with its wait for earlier ones.
        min_wait_seconds: No request recomputes before, however short its prompt.
    """
    remaining = remaining_seconds(progress)
    if progress.waited_seconds < min_wait_seconds:
        return HedgeDecision("wait", "no_hurry", remaining, local_seconds)
    if remaining <= (1 + MARGIN_RATIO) * local_seconds:
        return HedgeDecision("wait", "arrives_first", remaining, local_seconds)
    if progress.missing_bytes == progress.total_bytes:
        return HedgeDecision("recompute", "not_begun", remaining, local_seconds)
    is_paused = remaining == PAUSE_FACTOR * progress.paused_seconds
    return HedgeDecision("recompute", "paused" if is_paused else "slow", remaining, local_seconds)


class RecomputeQueue:
    """Local prefills of one engine that replaced late transfers, run one after the other. Times are in seconds.

    Without it, all requests that wait for a slow link would choose to recompute at once, and queue for each other.
    """

    def __init__(self) -> None:
        self._ends_at = 0.0

    def local_seconds(self, prefill_seconds: float, *, now: float) -> float:
        """Return the time until a prefill of this duration would end if it were added now."""
        return max(0.0, self._ends_at - now) + prefill_seconds

    def add(self, prefill_seconds: float, *, now: float) -> None:
        """Add a prefill."""
        self._ends_at = now + self.local_seconds(prefill_seconds, now=now)

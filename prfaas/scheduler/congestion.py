"""Raises t before a link chokes, and gives it back: PrfaaS, section 3.4, the short timescale, with hysteresis.

One step for each sample of a link (each second). Pressure is the worst of four signals, each as a share of its own
limit; losses and round trips count as what two samples on end say, since a packet that is lost or late on a link that is
hardly used is no congestion. Above 1 the multiplier of t grows at once, at most once per `raise_seconds` and not while the
pressure falls, as that of a queue does once nothing joins it. Below `calm_ratio` for `rest_seconds` on end it shrinks by one
step; in between it stays. A link that is calm because nothing uses it may still be narrow, so that first step down is a
test: it lets some traffic back, and what that does to the link shows before `calm_seconds` have passed, after which the next
step follows. So t moves a bounded number of times, a test that fails costs two of them, and it returns to 1 once the link
is well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Signal = Literal["utilisation", "queue", "loss", "rtt"]
_NOISY: tuple[Signal, ...] = ("loss", "rtt")


@dataclass(frozen=True)
class PathSample:
    """All links from one cluster to another at one moment."""

    bytes_per_second: float  # on average over the last ten seconds: one transfer may well fill a link for a moment
    capacity_bytes_per_second: float  # 0: not known, so utilisation and queue say nothing
    queued_bytes: int
    retransmit_ratio: float
    rtt_seconds: float
    min_rtt_seconds: float


@dataclass(frozen=True)
class CongestionLimits:
    """Where each signal stands when the link is congested, and how t follows."""

    utilisation_ratio: float = 0.85
    queue_seconds: float = 1.0  # that what waits would need at the link's capacity
    retransmit_ratio: float = 0.03  # beyond it TCP's own rate falls off on long links
    rtt_inflation_ratio: float = 3.0  # over the smallest RTT seen
    rtt_rise_seconds: float = 0.05  # and by at least so much: nearby, a busy host alone multiplies a round trip
    calm_ratio: float = 0.6  # of every limit: below this the link has room again
    step_ratio: float = 2.0
    max_multiplier: float = 32.0  # of a t of a few thousand tokens: more than any prompt
    raise_seconds: float = 2.0  # a figure is up to 2 s old: before that a rise cannot show, and t would overshoot
    rest_seconds: float = 40.0  # of calm before the first step down: a test that fails fills a narrow link
    calm_seconds: float = 3.0  # five steps from the highest multiplier, so t is back within a minute


@dataclass(frozen=True)
class Congestion:
    """How much t is multiplied by, and since when. Times are seconds on a clock that only goes forward."""

    multiplier: float = 1.0
    changed_at: float = float("-inf")
    calm_since: float | None = None
    rose_last: bool = False  # the last change was a rise
    cause: Signal | None = None  # of the last rise
    pressure: float = 0.0  # of the last sample
    noise: float = 0.0  # what its losses or round trips alone would have made of it


def pressures(sample: PathSample, limits: CongestionLimits) -> dict[Signal, float]:
    """Return each signal as a share of its limit; 1 and more is congested."""
    capacity = sample.capacity_bytes_per_second
    has_risen = 0 < sample.min_rtt_seconds < sample.rtt_seconds - limits.rtt_rise_seconds
    inflation = sample.rtt_seconds / sample.min_rtt_seconds if has_risen else 1.0
    return {
        "utilisation": sample.bytes_per_second / capacity / limits.utilisation_ratio if capacity > 0 else 0.0,
        "queue": sample.queued_bytes / capacity / limits.queue_seconds if capacity > 0 else 0.0,
        "loss": sample.retransmit_ratio / limits.retransmit_ratio,
        "rtt": max(0.0, inflation - 1) / (limits.rtt_inflation_ratio - 1),
    }


def step(state: Congestion, sample: PathSample, *, now: float, limits: CongestionLimits) -> Congestion:
    """Return the state after one sample."""
    signals = pressures(sample, limits)
    noise = max(signals["loss"], signals["rtt"])
    signals |= {name: min(signals[name], state.noise) for name in _NOISY}
    cause = max(signals, key=lambda name: signals[name])
    its, was = replace(state, pressure=signals[cause], noise=noise), state.pressure
    if its.pressure > limits.calm_ratio:
        rises = its.pressure >= max(1.0, was) and now - state.changed_at >= limits.raise_seconds
        return _raised(its, cause, now=now, limits=limits) if rises else replace(its, calm_since=None)
    calm_since = now if state.calm_since is None else state.calm_since
    wait = limits.rest_seconds if state.rose_last else limits.calm_seconds
    if state.multiplier == 1 or now - calm_since < wait:
        return replace(its, calm_since=calm_since)
    lower = max(1.0, state.multiplier / limits.step_ratio)
    cause_left = state.cause if lower > 1 else None
    return replace(its, multiplier=lower, changed_at=now, calm_since=now, rose_last=False, cause=cause_left)


def _raised(state: Congestion, cause: Signal, *, now: float, limits: CongestionLimits) -> Congestion:
    if state.multiplier >= limits.max_multiplier:
        return replace(state, calm_since=None)
    higher = min(limits.max_multiplier, state.multiplier * limits.step_ratio)
    return replace(state, multiplier=higher, changed_at=now, calm_since=None, rose_last=True, cause=cause)


def raised_threshold(threshold_tokens: int, state: Congestion) -> int:
    """t while the link is in this state."""
    return round(threshold_tokens * state.multiplier)

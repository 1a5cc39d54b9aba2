"""Raises the threshold t before a path congests, and lowers it again: PrfaaS, section 3.4, the short timescale.

`step` takes one sample of a path per second. Pressure is the worst of four signals, each as a share of its limit.
Losses and round trips count if two consecutive samples show them: one lost packet on an idle path is no congestion.

- Pressure above 1 multiplies t at once, at most once per `raise_seconds`, and not while the pressure falls.
- Pressure below `calm_ratio` for `rest_seconds` lowers t by one step. Further steps follow after `calm_seconds` each.
- Pressure in between leaves t unchanged.

An unused path looks calm although it may be narrow. The first step down is therefore a test: some traffic returns, and its
effect shows before the next step. So t changes a bounded number of times and returns to 1 once the path is well.
"""

from dataclasses import dataclass, replace
from typing import Literal

Signal = Literal["utilisation", "queue", "loss", "rtt"]
_NOISY: tuple[Signal, ...] = ("loss", "rtt")


@dataclass(frozen=True)
class PathSample:
    """All links from one cluster to another at one moment.

    `bytes_per_second` is a mean of ten seconds, because one transfer may fill a link for a moment.
    With an unknown capacity (0) utilisation and queue say nothing.
    """

    bytes_per_second: float
    capacity_bytes_per_second: float
    queued_bytes: int
    retransmit_ratio: float
    rtt_seconds: float
    min_rtt_seconds: float


@dataclass(frozen=True)
class CongestionLimits:
    """Limit of each signal, and the steps in which t follows the pressure."""

    utilisation_ratio: float = 0.85
    queue_seconds: float = 1.0  # Time that the queued bytes need at the path's capacity.
    retransmit_ratio: float = 0.03  # Above it TCP's own rate drops on long paths.
    rtt_inflation_ratio: float = 3.0  # Relative to the smallest round trip seen.
    rtt_rise_seconds: float = 0.05  # A busy host alone multiplies short round trips, so a rise must be this large.
    calm_ratio: float = 0.6  # Below this share of every limit the path has room again.
    step_ratio: float = 2.0
    max_multiplier: float = 32.0  # With a t of a few thousand tokens this exceeds any prompt.
    raise_seconds: float = 2.0  # Samples are up to 2 s old. An earlier second rise would overshoot.
    rest_seconds: float = 40.0  # Wait before the first step down, because a failed test fills a narrow path.
    calm_seconds: float = 3.0  # Five steps lead from the highest multiplier to 1 within a minute.


@dataclass(frozen=True)
class Congestion:
    """Multiplier of t, and its history. Times are seconds on a monotonic clock.

    `cause` is the signal behind the last rise, and `cause_pressure` what it was then. `pressure` is that of the last
    sample.
    `noise` is the pressure of that sample's losses and round trips alone.
    """

    multiplier: float = 1.0
    changed_at: float = float("-inf")
    calm_since: float | None = None
    rose_last: bool = False
    cause: Signal | None = None
    cause_pressure: float = 0.0
    pressure: float = 0.0
    noise: float = 0.0


def pressures(sample: PathSample, limits: CongestionLimits) -> dict[Signal, float]:
    """Return each signal as a share of its limit; from 1 on the path is congested."""
    capacity = sample.capacity_bytes_per_second
    has_risen = 0 < sample.min_rtt_seconds < sample.rtt_seconds - limits.rtt_rise_seconds
    inflation = sample.rtt_seconds / sample.min_rtt_seconds if has_risen else 1.0
    return {
        "utilisation": sample.bytes_per_second / capacity / limits.utilisation_ratio if capacity > 0 else 0.0,
        "queue": sample.queued_bytes / capacity / limits.queue_seconds if capacity > 0 else 0.0,
        "loss": sample.retransmit_ratio / limits.retransmit_ratio,
        "rtt": max(0.0, inflation - 1) / (limits.rtt_inflation_ratio - 1),
    }


def step(before: Congestion, sample: PathSample, *, now: float, limits: CongestionLimits) -> Congestion:
    """Return the state after one sample."""
    signals = pressures(sample, limits)
    noise = max(signals["loss"], signals["rtt"])
    signals |= {name: min(signals[name], before.noise) for name in _NOISY}
    cause = max(signals, key=lambda name: signals[name])
    state = replace(before, pressure=signals[cause], noise=noise)
    if state.pressure > limits.calm_ratio:
        is_rising = state.pressure >= max(1.0, before.pressure) and now - state.changed_at >= limits.raise_seconds
        return _raise(state, cause, now=now, limits=limits) if is_rising else replace(state, calm_since=None)
    calm_since = now if state.calm_since is None else state.calm_since
    wait = limits.rest_seconds if state.rose_last else limits.calm_seconds
    if state.multiplier == 1 or now - calm_since < wait:
        return replace(state, calm_since=calm_since)
    lower = max(1.0, state.multiplier / limits.step_ratio)
    cause_left = state.cause if lower > 1 else None
    return replace(state, multiplier=lower, changed_at=now, calm_since=now, rose_last=False, cause=cause_left)


def _raise(state: Congestion, cause: Signal, *, now: float, limits: CongestionLimits) -> Congestion:
    if state.multiplier >= limits.max_multiplier:
        return replace(state, calm_since=None)
    higher = min(limits.max_multiplier, state.multiplier * limits.step_ratio)
    raised = replace(state, multiplier=higher, changed_at=now, calm_since=None, rose_last=True)
    return replace(raised, cause=cause, cause_pressure=state.pressure)


def cause_in_words(state: Congestion, limits: CongestionLimits) -> str:
    """Return the figure behind the last rise, and its limit; nothing if t is not raised."""
    if state.cause is None:
        return ""
    pressure, inflation = state.cause_pressure, limits.rtt_inflation_ratio
    words, value, limit = {
        "utilisation": ("link {} % used", pressure * 100 * limits.utilisation_ratio, 100 * limits.utilisation_ratio),
        "queue": ("link queue {} s", pressure * limits.queue_seconds, limits.queue_seconds),
        "loss": (
            "{} % of the bytes sent in half a second were retransmissions",
            pressure * 100 * limits.retransmit_ratio,
            100 * limits.retransmit_ratio,
        ),
        "rtt": ("round trip {} times the lowest", 1 + pressure * (inflation - 1), inflation),
    }[state.cause]
    unit = words.partition("{}")[2].split()[0]
    figure = f"{float(format(value, '.3g')):,g}"
    return f"{words.format(figure)}, limit {limit:g} {unit}"


def raised_threshold(threshold_tokens: int, state: Congestion) -> int:
    """Return t while the path is in this state."""
    return round(threshold_tokens * state.multiplier)

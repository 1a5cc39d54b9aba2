"""Threshold t under congestion: it rises early, returns, and does not oscillate."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.congestion import (
    Congestion,
    CongestionLimits,
    PathSample,
    cause_in_words,
    pressures,
    raised_threshold,
    step,
)

LIMITS = CongestionLimits()
CALM = PathSample(10e6, 100e6, 0, 0.0, 0.05, 0.05)
FULL = replace(CALM, bytes_per_second=99e6)


START = Congestion()


def _run(samples: list[PathSample], state: Congestion = START, *, start: float = 0.0) -> list[Congestion]:
    states = []
    for second, sample in enumerate(samples):
        state = step(state, sample, now=start + second, limits=LIMITS)
        states.append(state)
    return states


@pytest.mark.parametrize(
    ("sample", "cause", "num_samples", "figures"),
    [
        (FULL, "utilisation", 1, ("99 %", "85 %")),
        (replace(CALM, queued_bytes=180_000_000), "queue", 1, ("1.8 s", "1 s")),
        (replace(CALM, retransmit_ratio=0.04), "loss", 2, ("4 %", "3 %")),
        (replace(CALM, rtt_seconds=0.16), "rtt", 2, ("3.2 times", "3 times")),
    ],
)
def test_each_signal_alone_raises_t_at_once_and_is_its_cause(
    sample: PathSample, cause: str, num_samples: int, figures: tuple[str, str]
) -> None:
    *before, state = _run([sample] * num_samples)
    assert [state.multiplier for state in before] == [1.0] * (num_samples - 1)
    assert (state.multiplier, state.cause) == (2.0, cause)
    assert raised_threshold(16_000, state) == 32_000
    later = _run([CALM], state, start=float(num_samples))[-1]
    assert all(figure in cause_in_words(later, LIMITS) for figure in figures), "the figures at the rise"


LOSSY, LATE = replace(CALM, retransmit_ratio=0.9), replace(CALM, rtt_seconds=0.9)


def test_one_sample_of_losses_or_late_packets_does_not_affect_t() -> None:
    assert {state.multiplier for state in _run([LOSSY, CALM, LATE, CALM] * 10)} == {1.0}
    raised = _run([FULL])[-1]
    assert _run([LOSSY, CALM, LATE, CALM] * 12, raised, start=1.0)[-1].multiplier == 1.0


@pytest.mark.parametrize(("rise_seconds", "is_said"), [(0.049, False), (0.051, True)])
def test_small_rise_of_the_round_trip_time_is_ignored(rise_seconds: float, is_said: bool) -> None:
    sample = replace(CALM, rtt_seconds=0.0002 + rise_seconds, min_rtt_seconds=0.0002)
    assert (pressures(sample, LIMITS)["rtt"] > 0) == is_said


def test_unknown_capacity_disables_utilisation_and_queue() -> None:
    sample = PathSample(1e9, 0.0, 1 << 30, 0.0, 0.0, 0.0)
    assert set(pressures(sample, LIMITS).values()) == {0.0}


def test_t_returns_to_normal_within_a_calm_minute() -> None:
    raised = _run([FULL] * 30)[-1]
    assert raised.multiplier == LIMITS.max_multiplier
    after = _run([CALM] * 60, raised, start=30.0)
    assert after[-1].multiplier == 1.0 and after[-1].cause is None
    falls = [state.multiplier for state in after]
    assert falls == sorted(falls, reverse=True)


def test_t_stays_within_the_hysteresis() -> None:
    between = replace(CALM, bytes_per_second=70e6)
    assert LIMITS.calm_ratio < pressures(between, LIMITS)["utilisation"] < 1
    raised = _run([FULL] * 3)[-1]
    assert {state.multiplier for state in _run([between] * 100, raised, start=3.0)} == {raised.multiplier}


def test_t_rises_only_while_a_queue_grows() -> None:
    queues = [replace(CALM, queued_bytes=queued * 10_000_000) for queued in (30, 28, 26, 24, 22, 20, 25)]
    assert [state.multiplier for state in _run(queues)] == [2.0] * 6 + [4.0]


CUT = replace(CALM, bytes_per_second=1e6, capacity_bytes_per_second=10e6)


@pytest.mark.parametrize("seconds", [40, 120, 600])
def test_narrow_path_is_tested_at_most_twice_a_minute(seconds: int) -> None:
    """Whatever t lets through fills it, and nothing does above t times two."""
    state, changes = START, 0
    for second in range(seconds):
        sample = FULL if state.multiplier < 2 else CUT
        after = step(state, sample, now=float(second), limits=LIMITS)
        changes, state = changes + (after.multiplier != state.multiplier), after
    assert changes <= 2 + 2 * (seconds // LIMITS.rest_seconds)


def test_steps_down_follow_a_successful_first_test() -> None:
    raised = _run([FULL] * 6)[-1]
    multipliers = [state.multiplier for state in _run([CALM] * 50, raised, start=6.0)]
    steps = [second for second, (a, b) in enumerate(itertools.pairwise([raised.multiplier, *multipliers])) if a != b]
    assert steps == [40, 43, 46] and multipliers[-1] == 1.0


samples = st.builds(
    PathSample,
    st.floats(0, 2e8),
    st.sampled_from([0.0, 1e8]),
    st.integers(0, 1 << 30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)


@given(st.lists(samples, max_size=60))
def test_t_stays_within_its_bounds_and_changes_at_most_once_a_second(taken: list[PathSample]) -> None:
    previous = 1.0
    for state in _run(taken):
        assert 1.0 <= state.multiplier <= LIMITS.max_multiplier
        ratio = max(state.multiplier, previous) / min(state.multiplier, previous)
        assert ratio <= LIMITS.step_ratio * (1 + 1e-9)
        previous = state.multiplier


@given(samples, st.floats(1, 3))
def test_worse_sample_never_lowers_t_more(sample: PathSample, factor: float) -> None:
    raised = replace(_run([FULL] * 3)[-1], calm_since=0.0)
    worse = replace(
        sample, retransmit_ratio=sample.retransmit_ratio * factor, bytes_per_second=sample.bytes_per_second * factor
    )
    after, after_worse = (step(raised, latest, now=60.0, limits=LIMITS) for latest in (sample, worse))
    assert after_worse.multiplier >= after.multiplier

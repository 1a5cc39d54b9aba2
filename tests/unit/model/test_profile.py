import numpy as np
import pytest

from prfaas.model.cost.curve import polynomial, through
from prfaas.model.cost.profile import PrefillProfile, fit_decode

QUADRATIC = PrefillProfile(polynomial(0.4, 1e-4, 3e-10), 1000, 128_000)


def test_an_append_to_a_quadratic_costs_its_own_attention_over_the_prefix() -> None:
    new, cached = 2000.0, 30_000.0
    expected = 0.4 + 1e-4 * new + 3e-10 * (new**2 + 2 * new * cached)
    assert QUADRATIC.seconds(new, cached) == pytest.approx(expected)


def test_appends_cost_less_than_the_whole_and_more_than_alone() -> None:
    interpolated = PrefillProfile(through([1000, 8000, 32000], [0.44, 0.72, 1.84]), 1000, 32_000)
    for profile in (QUADRATIC, interpolated):
        assert profile.seconds(2000) <= profile.seconds(2000, 20_000) < profile.seconds(22_000)


def test_measured_appends_replace_the_derived_ones() -> None:
    measured = PrefillProfile(QUADRATIC.fresh, 1000, 128_000, append=(0.1, 2e-4, 1e-10, 1e-9))
    assert measured.seconds(2000, 10_000) == pytest.approx(0.1 + 0.4 + 4e-4 + 0.02)
    assert measured.seconds(2000) == QUADRATIC.seconds(2000)


def test_arrays_agree_with_single_values() -> None:
    measured = PrefillProfile(QUADRATIC.fresh, 1000, 128_000, append=(0.1, 2e-4, 1e-10, 1e-9))
    new, cached = np.array([500.0, 2000.0, 9000.0]), np.array([0.0, 10_000.0, 300.0])
    for profile in (QUADRATIC, measured):
        expected = [profile.seconds(m, n) for m, n in zip(new.tolist(), cached.tolist(), strict=True)]
        assert profile.at(new, cached).tolist() == pytest.approx(expected)


def test_the_plane_through_decode_steps_is_found() -> None:
    batches, contexts = [1.0, 8.0, 32.0, 8.0], [1000.0, 1000.0, 1000.0, 9000.0]
    steps = [0.01 + 2e-4 * b + 1e-8 * b * c for b, c in zip(batches, contexts, strict=True)]
    profile = fit_decode(batches, contexts, steps)
    assert profile.step_seconds(16, 5000) == pytest.approx(0.01 + 2e-4 * 16 + 1e-8 * 16 * 5000)
    assert profile.max_batch == 32


@pytest.mark.parametrize(("batches", "steps"), [([4.0, 4.0], [0.1, 0.1]), ([1.0, 8.0], [0.2, 0.1])])
def test_decode_steps_that_fit_no_plane_are_refused(batches: list[float], steps: list[float]) -> None:
    with pytest.raises(ValueError, match=r"batch"):
        fit_decode(batches, [0.0] * len(batches), steps)

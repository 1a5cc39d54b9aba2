import numpy as np
import pytest

from prfaas.model.cost.curve import (
    cached_tokens,
    new_tokens,
    of_new_tokens,
    polynomial,
    through,
    unit_cost,
    weighted_sum,
)
from prfaas.model.cost.lengths import Lengths, expectation, log_normal, mean_tokens, mixture
from tests.support.planner_inputs import PAPER_LENGTHS

LOW, HIGH = np.log(128), np.log(131_072)


def by_quadrature(values: np.ndarray, mu: float, sigma: float) -> float:
    """Return the mean over the normal density of values at equally spaced logarithms of lengths."""
    density = np.exp(-(((np.linspace(LOW, HIGH, len(values)) - mu) / sigma) ** 2) / 2)
    return float(np.trapezoid(values * density) / np.trapezoid(density))


def test_the_trace_of_the_paper_has_its_mean_and_its_share_above_the_threshold() -> None:
    assert mean_tokens(PAPER_LENGTHS) == pytest.approx(27_000, rel=0.02)
    above = 1 - PAPER_LENGTHS.cumulative(unit_cost)(19_400)
    assert above == pytest.approx(0.496, abs=5e-4)
    tokens = expectation(PAPER_LENGTHS, new_tokens) - PAPER_LENGTHS.cumulative(new_tokens)(19_400)
    assert tokens / above == pytest.approx(44_000, rel=0.03)


@pytest.mark.parametrize("threshold", [500, 5000, 19_400, 60_000, 200_000])
def test_partial_expectations_are_the_integrals(threshold: float) -> None:
    curve = through([1000, 8000, 32000, 128000], [0.44, 0.72, 1.84, 7.40])
    tokens = np.exp(np.linspace(LOW, HIGH, 400_001))
    expected = by_quadrature(np.where(tokens <= threshold, curve.many(tokens), 0.0), 9.9, 1.0)
    assert PAPER_LENGTHS.cumulative(of_new_tokens(curve))(threshold) == pytest.approx(expected, rel=1e-3)


def test_a_wide_distribution_keeps_its_tail() -> None:
    tokens = np.exp(np.linspace(LOW, HIGH, 400_001))
    square = of_new_tokens(polynomial(0, 0, 1))
    assert expectation(log_normal(5.0, 2.0, 128, 131_072), square) == pytest.approx(
        by_quadrature(tokens**2, 5.0, 2.0), rel=1e-5
    )


def test_log_normal_has_no_mass_outside_its_range() -> None:
    mass = PAPER_LENGTHS.cumulative(unit_cost)
    assert (mass(0), mass(128), mass(131_072), mass(1e9)) == pytest.approx((0, 0, 1, 1))


def test_a_trace_counts_the_requests_at_the_threshold_as_short() -> None:
    tokens = Lengths([300, 100, 200]).cumulative(new_tokens)
    assert [tokens(t) * 3 for t in (99, 100, 199, 200, 300)] == pytest.approx([0, 100, 100, 300, 600])


def test_cached_tokens_stay_with_their_request() -> None:
    cached = Lengths([300, 100], [7, 9]).cumulative(cached_tokens)
    assert (cached(100) * 2, cached(300) * 2) == pytest.approx((9, 16))


def test_a_mixture_is_the_weighted_sum_of_its_parts() -> None:
    mixed = mixture([(0.4, PAPER_LENGTHS), (0.6, Lengths([100, 50_000]))])
    first, second = PAPER_LENGTHS.cumulative(new_tokens), Lengths([100, 50_000]).cumulative(new_tokens)
    assert mixed.cumulative(new_tokens)(20_000) == pytest.approx(0.4 * first(20_000) + 0.6 * second(20_000))


def test_points_and_draws_have_the_mean_of_the_distribution() -> None:
    drawn, _ = PAPER_LENGTHS.draw(50_000, np.random.default_rng(7))
    assert drawn.mean() == pytest.approx(mean_tokens(PAPER_LENGTHS), rel=0.02)
    for lengths in (PAPER_LENGTHS, Lengths(drawn)):
        new, _, weights = lengths.points(4096)
        assert weights.sum() == pytest.approx(1)
        assert (np.diff(new) >= 0).all()
        assert weights @ new == pytest.approx(mean_tokens(lengths), rel=2e-3)


def test_a_cached_ratio_reaches_the_costs_that_depend_on_it() -> None:
    lengths = log_normal(9.9, 1.0, 128, 131_072, cached_ratio=2.0)
    assert expectation(lengths, cached_tokens) == pytest.approx(2 * mean_tokens(lengths))


def test_expected_minimum_is_taken_per_request() -> None:
    rising, flat = of_new_tokens(polynomial(0.1, 1e-4, 2e-9)), of_new_tokens(polynomial(2.0))
    expected = 0.25 * (0.1 + 1e-2 + 2e-5) + 0.75 * 2.0
    weighted = Lengths([100, 50_000], weights=np.array([1.0, 3.0]))
    assert weighted.expected_minimum([rising, flat]) == pytest.approx(expected)


def test_a_weighted_sum_adds_its_terms() -> None:
    cost = weighted_sum([(2.0, unit_cost), (0.0, cached_tokens), (3.0, new_tokens)])
    assert cost(np.array([10.0, 20.0]), np.ones(2)).tolist() == [32.0, 62.0]

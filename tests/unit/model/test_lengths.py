from __future__ import annotations

import numpy as np
import pytest

from prfaas.model.cost.curve import NEW_TOKENS, ONE, CachedTokens, OfNewTokens, polynomial, through
from prfaas.model.cost.lengths import Empirical, LogNormal, Mixture, expectation, mean_tokens
from tests.support.planner_inputs import PAPER_LENGTHS


def sampled(lengths: LogNormal, count: int) -> np.ndarray:
    draws = np.random.default_rng(7).lognormal(lengths.mu, lengths.sigma, count * 2)
    kept: np.ndarray = draws[(draws >= lengths.low) & (draws <= lengths.high)]
    return kept


def test_the_trace_of_the_paper_has_its_mean_and_its_share_above_the_threshold() -> None:
    assert mean_tokens(PAPER_LENGTHS) == pytest.approx(27_000, rel=0.02)
    above = 1 - PAPER_LENGTHS.cumulative(ONE)(19_400)
    assert above == pytest.approx(0.496, abs=5e-4)
    tokens = expectation(PAPER_LENGTHS, NEW_TOKENS) - PAPER_LENGTHS.cumulative(NEW_TOKENS)(19_400)
    assert tokens / above == pytest.approx(44_000, rel=0.03)


def test_partial_expectations_are_those_of_a_large_sample() -> None:
    cost = OfNewTokens(through([1000, 8000, 32000, 128000], [0.44, 0.72, 1.84, 7.40]))
    partial, draws = PAPER_LENGTHS.cumulative(cost), sampled(PAPER_LENGTHS, 400_000)
    for threshold in (500, 1000, 5000, 19_400, 60_000, 200_000):
        expected = np.where(draws <= threshold, cost.curve.many(draws), 0).mean()
        assert partial(threshold) == pytest.approx(expected, rel=2e-2, abs=1e-3)


def test_log_normal_has_no_mass_outside_its_range() -> None:
    mass = PAPER_LENGTHS.cumulative(ONE)
    assert (mass(0), mass(128), mass(131_072), mass(1e9)) == pytest.approx((0, 0, 1, 1))


def test_a_trace_counts_the_requests_at_the_threshold_as_short() -> None:
    tokens = Empirical([300, 100, 200]).cumulative(NEW_TOKENS)
    assert [tokens(t) * 3 for t in (99, 100, 199, 200, 300)] == pytest.approx([0, 100, 100, 300, 600])


def test_cached_tokens_stay_with_their_request() -> None:
    cached = Empirical([300, 100], [7, 9]).cumulative(CachedTokens())
    assert (cached(100) * 2, cached(300) * 2) == pytest.approx((9, 16))


def test_a_mixture_is_the_weighted_sum_of_its_parts() -> None:
    mixed = Mixture(((0.3, PAPER_LENGTHS), (0.5, Empirical([100, 50_000]))))
    assert expectation(mixed, ONE) == pytest.approx(0.8)
    first, second = PAPER_LENGTHS.cumulative(NEW_TOKENS), Empirical([100, 50_000]).cumulative(NEW_TOKENS)
    assert mixed.cumulative(NEW_TOKENS)(20_000) == pytest.approx(0.3 * first(20_000) + 0.5 * second(20_000))


def test_points_have_the_mean_of_the_distribution() -> None:
    for lengths in (PAPER_LENGTHS, Empirical(sampled(PAPER_LENGTHS, 50_000))):
        new, _, weights = lengths.points(4096)
        assert weights.sum() == pytest.approx(1)
        assert (np.diff(new) >= 0).all()
        assert weights @ new == pytest.approx(mean_tokens(lengths), rel=2e-3)


def test_a_cached_ratio_reaches_the_costs_that_depend_on_it() -> None:
    lengths = LogNormal(9.9, 1.0, 128, 131_072, cached_ratio=2.0)
    assert expectation(lengths, CachedTokens()) == pytest.approx(2 * mean_tokens(lengths))


def test_a_wide_distribution_keeps_its_tail_exact() -> None:
    lengths = LogNormal(5.0, 2.0, 1, 1e7)
    z = np.linspace((np.log(1) - 5) / 2, (np.log(1e7) - 5) / 2, 200_001)
    density = np.exp(-z * z / 2)
    expected = np.trapezoid(np.exp(5 + 2 * z) ** 2 * density, z) / np.trapezoid(density, z)
    assert expectation(lengths, OfNewTokens(polynomial(0, 0, 1))) == pytest.approx(expected, rel=1e-6)

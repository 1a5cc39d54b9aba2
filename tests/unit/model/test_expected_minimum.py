from __future__ import annotations

import numpy as np
import pytest

from prfaas.model.cost.curve import NEW_TOKENS, ONE, OfNewTokens, WeightedCost, polynomial
from prfaas.model.cost.lengths import Empirical, LogNormal, Mixture

LENGTHS = LogNormal(9.9, 1.0, 128, 131_072)
RISING, FLAT, LATE = (
    OfNewTokens(polynomial(*c)) for c in ((0.1, 1e-4, 2e-9), (2.0, 0.0, 0.0), (0.5, 2e-5, 5e-9))
)  # fmt: skip


def by_quadrature(lengths: LogNormal, costs: list[OfNewTokens]) -> float:
    z = np.linspace((np.log(lengths.low) - lengths.mu), np.log(lengths.high) - lengths.mu, 400_001) / lengths.sigma
    density = np.exp(-z * z / 2)
    tokens = np.exp(lengths.mu + lengths.sigma * z)
    least = np.minimum.reduce([cost.curve.many(tokens) for cost in costs])
    return float(np.trapezoid(least * density, z) / np.trapezoid(density, z))


def test_expected_minimum_switches_costs_at_each_crossing() -> None:
    costs = [RISING, FLAT, LATE]
    assert LENGTHS.expected_minimum(costs) == pytest.approx(by_quadrature(LENGTHS, costs), rel=1e-6)
    assert LENGTHS.expected_minimum(costs) < 0.99 * min(LENGTHS.expected_minimum([cost]) for cost in costs)


def test_expected_minimum_of_a_trace_is_taken_per_request() -> None:
    trace = Empirical([100, 50_000])
    expected = (RISING.curve(100) + FLAT.curve(50_000)) / 2
    assert trace.expected_minimum([RISING, FLAT]) == pytest.approx(expected)


def test_expected_minimum_of_a_mixture_is_the_weighted_sum() -> None:
    trace = Empirical([100, 50_000])
    mixed = Mixture(((0.25, LENGTHS), (0.5, trace)))
    expected = 0.25 * LENGTHS.expected_minimum([RISING, FLAT]) + 0.5 * trace.expected_minimum([RISING, FLAT])
    assert mixed.expected_minimum([RISING, FLAT]) == pytest.approx(expected)


def test_weighted_cost_is_the_sum_of_its_terms() -> None:
    cost = WeightedCost(((2.0, ONE), (0.0, RISING), (3.0, NEW_TOKENS)))
    tokens = np.array([10.0, 20.0])
    assert cost.at(tokens, np.zeros(2)).tolist() == [32.0, 62.0]
    assert cost.along(0.0)(20.0) == 62.0

import pytest

from prfaas.model.cost.curve import Curve, fitted, through


def test_a_curve_through_points_meets_them_and_goes_straight_on() -> None:
    curve = through([1, 3, 5], [10, 20, 60])
    assert [curve(x) for x in (1, 2, 3, 4, 5, 7)] == [10, 15, 20, 40, 60, 100]


def test_a_sum_of_curves_is_the_sum_of_their_values_around_every_knot() -> None:
    left, right = through([1, 3, 5], [10, 20, 60]), Curve((4.0,), ((1, 2, 3), (4, 5, 6)))
    total = left.plus(right)
    for length in (0, 2.9, 3, 3.5, 4, 4.5, 9):
        assert total(length) == pytest.approx(left(length) + right(length))


def test_the_fit_to_table_5_is_the_one_that_table_6_was_computed_from() -> None:
    (found,) = fitted([1000, 8000, 32000, 128000], [0.44, 0.72, 1.84, 7.40]).pieces
    assert found == pytest.approx((0.3891, 0.04206e-3, 9.94e-11), rel=2e-3)


@pytest.mark.parametrize("tokens", [[1.0], [2.0, 2.0], [3.0, 1.0]])
def test_unordered_points_are_refused(tokens: list[float]) -> None:
    with pytest.raises(ValueError, match="increasing"):
        through(tokens, [1.0] * len(tokens))

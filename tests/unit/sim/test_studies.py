"""The saturated twin against the solver over splits and thresholds, and the frontier of several runs."""

import pytest

from benchmarks.studies.search_study import Point, search
from benchmarks.studies.study_plots import frontier


@pytest.fixture(scope="module")
def found() -> tuple[list[Point], list[Point]]:
    return search(lambda *_: None, num_requests=2_500)


def test_saturated_twin_agrees_with_the_solver_at_each_split_and_threshold(
    found: tuple[list[Point], list[Point]],
) -> None:
    for row in (*found[0], *found[1]):
        # The soak test with more requests is closer.
        assert row.served == pytest.approx(row.solved, rel=0.06), row


def test_the_twins_searches_peak_where_the_papers_figure_does(found: tuple[list[Point], list[Point]]) -> None:
    splits, thresholds = found
    assert max(splits, key=lambda point: point.served).num_prefill == 3
    assert max(thresholds, key=lambda point: point.served).threshold_tokens == 19_400


@pytest.mark.soak
def test_over_thirty_thousand_requests_the_searches_agree_within_a_fiftieth() -> None:
    for points in search(lambda *_: None):
        for row in points:
            assert row.served == pytest.approx(row.solved, rel=0.02), row


def test_frontier_has_the_unbeaten_points() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (1.5, 4.0), (3.0, 3.0), (0.5, 1.0), (0.4, 0.2), (3.0, 5.0)]
    assert frontier(points) == [(0.4, 0.2), (1.0, 1.0), (3.0, 3.0)]

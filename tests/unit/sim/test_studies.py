"""Studies: their small forms say what the large ones do, and every plot is drawn from a study's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies.search_study import Point, search
from benchmarks.studies.studies import STUDIES, Table
from benchmarks.studies.study_plots import PLOTS, write
from prfaas.sim.plots import frontier


def point(num_prefill: int, threshold_tokens: int, points: list[Point]) -> Point:
    (found,) = (
        point for point in points if (point.num_prefill, point.threshold_tokens) == (num_prefill, threshold_tokens)
    )
    return found


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


ROWS: dict[str, list[Table]] = {
    "queueing": [Table("TTFT with queues", ("",) * 5, (("50%", "a", 1.0, 2.0, 3.0), ("80%", "a", 1.5, 3.0, 5.0)))],
    "search": [Table(title, ("x", "", ""), ((1, 2.0, 2.1), (2, 3.0, 2.9))) for title in ("split", "t")],
    "ppd-figures": [
        Table("1", ("",) * 5, tuple(("1", "4R", kind, 100.0, 0.5) for kind in ("baseline", "D-local capable"))),
        Table("4", ("",) * 10, (("chats", "1P_3D", 2.0, "x = 0", 3.0, 2.5, 5.0, 1, 0, 0.0),)),
        Table("5", ("",) * 4, (("x = 0", 100.0, 9.0, 0.0), ("w_tpot = 3", 50.0, 10.0, 0.5))),
    ],
    "overlap": [Table("", ("",) * 7, (("a", 40.0, 1.0, 2.0, 0.3, -0.1, 1.0), ("b", 40.0, 1.0, 2.0, 0.3, 0.1, 0.7)))],
    "rapid": [Table("Over the load", ("",) * 7, (("Llama-70B", "arXiv", "rapid", 1.0, 1.0, 0.9, 0.05),))],
}


@pytest.mark.parametrize("study", PLOTS)
def test_a_study_is_drawn_from_its_tables(study: str, tmp_path: Path) -> None:
    files = write(study, ROWS[study], tmp_path)
    assert [file.stem for file in files] == list(PLOTS[study])
    assert all(file.stat().st_size > 1000 for file in files)


def test_the_same_tables_are_the_same_files(tmp_path: Path) -> None:
    ((first,), (again,)) = (write("search", ROWS["search"], tmp_path / name) for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()


def test_frontier_has_the_unbeaten_points() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (1.5, 4.0), (3.0, 3.0), (0.5, 1.0), (0.4, 0.2), (3.0, 5.0)]
    assert frontier(points) == [(0.4, 0.2), (1.0, 1.0), (3.0, 3.0)]


def test_tables_without_a_plot_draw_nothing(tmp_path: Path) -> None:
    assert set(PLOTS) < set(STUDIES)
    assert write("ppd-weights", [], tmp_path) == []

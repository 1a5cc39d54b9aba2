from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.solve.files import catalog
from prfaas.solve.files.profile_file import read_colocation, read_profile

HEAD = "name: p\nhardware: X\nsource: test\n"


def read(folder: Path, text: str) -> object:
    path = folder / "p.yaml"
    path.write_text(HEAD + text, encoding="utf-8")
    return read_profile(path)


@pytest.mark.parametrize("name", catalog.names("profiles"))
def test_every_catalogued_profile_reads_and_says_where_it_is_from(name: str) -> None:
    profile = catalog.find_profile(name)
    assert profile.name == name
    assert len(profile.source) > 10


def test_h20_profile_is_marked_as_inferred() -> None:
    profile = catalog.find_profile("h20-internal-1t")
    assert profile.inferred == ("prefill of h20-internal-1t", "decode of h20-internal-1t")
    assert profile.decode is not None
    assert profile.decode.step_seconds(20, 0) == pytest.approx(0.025)


def test_table_5_is_measured_and_its_fit_names_its_error() -> None:
    profile = catalog.find_profile("h200-internal-1t")
    assert profile.inferred == ()
    assert 0.005 < profile.fit_error < 0.03


def test_points_with_a_prefix_make_an_append_profile(tmp_path: Path) -> None:
    def seconds(new: int, cached: int) -> float:
        return 0.1 + 1e-4 * new + 1e-9 * new * new + 3e-9 * new * cached

    points = [(1000, 0), (8000, 0), (32000, 0), (500, 4000), (2000, 4000), (500, 30000), (2000, 30000), (4000, 8000)]
    listed = "".join(f"    - {{tokens: {m}, cached: {n}, seconds: {seconds(m, n):.9f}}}\n" for m, n in points)
    profile = read(tmp_path, "prefill:\n  points:\n" + listed)
    assert profile.prefill.seconds(3000, 20_000) == pytest.approx(seconds(3000, 20_000), rel=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prefill:\n  points: []\n", "no points"),
        ("prefill:\n  points: [{tokens: 1K, seconds: 1}, {tokens: 2K, seconds: 2}]\n", "three points"),
        ("prefill:\n  fit: interpolate\n  points: [{tokens: 1K, seconds: 2}, {tokens: 2K, seconds: 1}]\n", "rising"),
        ("prefill:\n  points: [{tokens: 1KB, seconds: 1}]\n", "line 5.*KB"),
        ("prefill:\n  fit: coefficients\n  seconds: 1\n", "min_tokens"),
        (
            "prefill:\n  fit: interpolate\n  points: [{tokens: 1, seconds: 1}, {tokens: 9, seconds: 2},"
            " {tokens: 2, cached: 3, seconds: 1}]\n",
            "at least four",
        ),
    ],
)
def test_invalid_profile_points_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, text)


SHARED = "colocation:\n  decode: [{batch: 4, share: 0.5, step: 10ms}, {batch: 4, share: 1, step: 12ms}"


def test_profile_file_has_measurements_of_a_shared_device(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + SHARED + "]\n", encoding="utf-8")
    assert read_colocation(path).at(4) == ((0.01,), 0.012)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (SHARED + ", {batch: 8, share: 0.5, step: 10ms}]\n", "no point for a batch of 8 on a share of 1"),
        ("", "at least one share"),
    ],
)
def test_decode_points_without_a_grid_are_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        read_colocation(path)

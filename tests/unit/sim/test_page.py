"""Tables of benchmarks/twin/README.md and the benchmark's results."""

import json
from typing import Any

import pytest

from benchmarks.twin.page import CONSTANTS, PAGE, RESULT, TABLES, with_tables


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_table_shows_the_results(page: str, results: dict[str, Any]) -> None:
    assert with_tables(page, results) == page, "run `make bench AREA=twin`"


@pytest.mark.parametrize("name", [*TABLES, *CONSTANTS])
def test_every_table_is_on_the_page_once(page: str, name: str) -> None:
    assert page.count(f"<!-- table: {name} -->") == 1

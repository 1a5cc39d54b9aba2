"""Engines that the end-to-end tests share: one pair of a model family at a time, started once."""

from collections.abc import Iterator

import pytest

from tests.support.engine_pair import FURTHER, REPRESENTATIVE, EnginePair, running_pair

# Files that restart agents or engines of a pair.
LAST = {"test_fetched_prefixes", "test_frozen_core", "test_policies", "test_process_kills"}


@pytest.fixture(
    scope="session", params=[*REPRESENTATIVE, *(pytest.param(family, marks=pytest.mark.soak) for family in FURTHER)]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    """Yield a running pair of each family in turn."""
    with running_pair(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by family, so that each pair starts once."""
    families = [*REPRESENTATIVE, *FURTHER]

    def rank(item: pytest.Item) -> tuple[bool, int, bool]:
        if "tests/e2e/" not in item.nodeid:
            return False, 0, False
        family = item.callspec.params.get("pair") if hasattr(item, "callspec") else None
        return True, families.index(family) if family in families else len(families), item.path.stem in LAST

    items.sort(key=rank)

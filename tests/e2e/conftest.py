"""The engines that the end-to-end tests share: one pair at a time, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.pair import PAIRS, Pair, running_pair


@pytest.fixture(scope="session", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A running pair of each family in turn."""
    with running_pair(request.param, tmp_path_factory.mktemp(request.param), has_manager=True) as running:
        yield running

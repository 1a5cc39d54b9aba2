"""Fixtures with agents that end with their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents, on_thread


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Agents on threads of this process, which start fast."""
    made = Agents(tmp_path, launch=on_thread)
    yield made
    made.stop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Agents]:
    """Agents as processes, which can be killed and have their own metrics."""
    made = Agents(tmp_path)
    yield made
    made.stop()

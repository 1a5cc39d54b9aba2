"""Agents that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents, on_thread


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Agents on threads of this process."""
    made = Agents(tmp_path, launch=on_thread)
    yield made
    made.stop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Agents]:
    """Agents that can be killed, and that count for themselves alone."""
    made = Agents(tmp_path)
    yield made
    made.stop()

"""Conformance tests of the connector, which need vLLM. Engines of several tests share two nodes."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tests.integration.connector.conftest  # noqa: F401
from tests.support.agent_nodes import Nodes, running_nodes

if TYPE_CHECKING:
    from tests.support.scheduled_engines import ScheduledEngines

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose configuration vLLM reads. Its weights are not loaded."""
    from tools.tiny_models import make_model  # noqa: PLC0415  It needs torch.

    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with running_nodes(tmp_path_factory.mktemp("nodes")) as running:
        yield running


@pytest.fixture
def engines(shared_nodes: Nodes, model: Path) -> Iterator[ScheduledEngines]:
    from tests.support.scheduled_engines import ScheduledEngines  # noqa: PLC0415  It needs vLLM.

    made = ScheduledEngines(shared_nodes, model, f"model {next(_numbers)}")
    yield made
    made.close()

"""Two nodes with real agents, on which every test has a model of its own. vLLM is imported once, without warnings."""

import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.agent_nodes import Nodes, running_nodes

collect_ignore = (
    []
    if importlib.util.find_spec("vllm")
    else [f"test_{name}.py" for name in ("vllm_interface", "kinds_no_cpu_runs", "offloading_tier")]
)

if not collect_ignore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Modules of other projects warn when imported.
        importlib.import_module("prfaas.connector.vllm.connector")


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with running_nodes(tmp_path_factory.mktemp("nodes")) as running:
        yield running


@pytest.fixture
def nodes(shared_nodes: Nodes) -> Iterator[Nodes]:
    """Yield nodes that outlive the test."""
    own = replace(shared_nodes, model=f"model {next(_numbers)}", engines=[])
    yield own
    own.close()


@pytest.fixture
def mortal_nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Yield nodes whose agents the test may kill."""
    with running_nodes(tmp_path) as running:
        yield running

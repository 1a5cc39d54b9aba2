"""Two nodes; and vLLM, imported where it is installed, once, and without its dependencies' own warnings."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.connector.nodes import Nodes, running_nodes

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_connector.py"]

if not collect_ignore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other projects' modules as they are imported
        importlib.import_module("prfaas.connector.vllm")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with running_nodes(tmp_path) as running:
        yield running

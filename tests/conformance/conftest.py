"""The connector's two nodes; where vLLM is not installed its tests are left out."""

from __future__ import annotations

import importlib.util

from tests.integration.connector.conftest import nodes as nodes

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_connector.py"]

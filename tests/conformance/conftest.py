"""Where vLLM is not installed the connector's conformance tests are left out."""

from __future__ import annotations

import importlib.util

import tests.integration.connector.conftest  # noqa: F401  imports vLLM without its dependencies' warnings

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_connector.py"]

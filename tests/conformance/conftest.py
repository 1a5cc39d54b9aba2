"""Conformance tests of the connector, which need vLLM."""

from __future__ import annotations

import importlib.util

import tests.integration.connector.conftest  # noqa: F401

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_connector.py", "test_random_requests.py"]

"""Where vLLM is not installed the connector's conformance tests are left out."""

from __future__ import annotations

import importlib.util

import tests.integration.connector.conftest  # noqa: F401  imports vLLM without its dependencies' warnings

NEED_VLLM = ["test_connector.py", "test_random_lives.py", "test_real_engines_agree.py"]
collect_ignore = [] if importlib.util.find_spec("vllm") else NEED_VLLM

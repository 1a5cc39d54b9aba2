"""The only package that imports vllm: PrfaasConnector, and what reads vLLM's own objects."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return PrfaasConnector for `"kv_connector_module_path": "prfaas.connector.vllm"`; vllm is imported only then."""
    if name != "PrfaasConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prfaas.connector.vllm.connector import PrfaasConnector  # noqa: PLC0415  vllm's plugins must load without it

    return PrfaasConnector

"""PrfaasConnector and the readers of vLLM's objects: the only part of the connector that imports vLLM."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return PrfaasConnector for `"kv_connector_module_path": "prfaas.connector.vllm"`, and import vLLM only then."""
    if name != "PrfaasConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prfaas.connector.vllm.connector import PrfaasConnector  # noqa: PLC0415  vLLM's plugins load without it.

    return PrfaasConnector

"""Entry point that makes `"kv_connector": "PrfaasConnector"` known to vLLM if this package is installed."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "PrfaasConnector"


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes, sometimes more than once."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "prfaas.connector.vllm.connector", NAME)

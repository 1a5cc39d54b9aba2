"""The entry point by which vLLM knows the connector by its plain name."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "PrfaasConnector"


def register() -> None:
    """Called by vLLM in each of its processes (entry point group `vllm.general_plugins`); may be called twice."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "prfaas.connector.vllm", NAME)

"""Entry point that makes `"kv_connector": "PrfaasConnector"` known to vLLM if this package is installed."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from prfaas.connector.vllm.health import watch_engine_core
from prfaas.connector.vllm.stream_report import is_api_server, report_in_streams

NAME = "PrfaasConnector"


def register() -> None:
    """Register the connector, and extend the API server. vLLM calls this in each of its processes."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "prfaas.connector.vllm.connector", NAME)
    if is_api_server():
        report_in_streams()
        watch_engine_core()

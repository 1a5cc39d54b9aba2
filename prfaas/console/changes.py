"""Changes to a deployment, requested from the managers over gRPC under the operator's name."""

from collections.abc import Mapping
from typing import Any

from google.protobuf import message_factory
from google.protobuf.json_format import MessageToDict

from prfaas.console.config import ConsoleConfig
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.methods import SERVICE


async def carry_out(
    config: ConsoleConfig, secret: bytes, method: str, *requests: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Carry out operations on nodes one after another. `requests` and the result have the fields of the messages.

    Raises:
        ManagerUnreachable: no manager completes the change in time.
        IndexRefusal: a node is unknown or silent, this name has no operator rights, or the order is not possible.
    """
    request_class = message_factory.GetMessageClass(SERVICE.methods_by_name[method].input_type)
    tls, deadline = config.tls.files(), config.timeout
    client = ManagerClient(config.managers, name=config.name, secret=secret, deadline_seconds=deadline, tls=tls)
    try:
        return [_fields(await client.operate(method, request_class(**request))) for request in requests]
    finally:
        await client.close()


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message. Protobuf's JSON writes 64-bit numbers as text."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {name: int(value) if name.endswith("_bytes") else value for name, value in found.items()}

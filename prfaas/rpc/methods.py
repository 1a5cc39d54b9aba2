"""Methods of the manager's services, read from the generated descriptors for server and clients.

The code of protoc's gRPC plugin would be bound to one release of grpcio.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from prfaas.rpc.generated import externalscaler_pb2
from prfaas.rpc.generated import manager_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Manager"]
SERVICE_NAME: str = SERVICE.full_name
SCALER_SERVICE = externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"]  # Of KEDA.


def server_handlers(implementations: Mapping[str, Callable[..., Any]], *, service: Any = SERVICE) -> Any:
    """Return gRPC's generic handler of a service.

    `implementations` has a coroutine function or async generator per method. It gets None for a message that cannot be
    decoded.
    """
    handlers = {}
    for method in service.methods:
        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.client_streaming, method.server_streaming]
        request = message_factory.GetMessageClass(method.input_type)
        handlers[method.name] = kind(
            implementations[method.name],
            request_deserializer=functools.partial(read_message, request),
            response_serializer=lambda message: message.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def read_message(kind: Any, data: bytes) -> Any:
    """Decode a message, or return None so that the method can refuse it with its own reason."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def client_calls(channel: Any) -> dict[str, Any]:
    """Return one callable per method on a channel of `grpc` or `grpc.aio`."""
    calls = {}
    for method in SERVICE.methods:
        kind = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, True): channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        calls[method.name] = kind(
            f"/{SERVICE_NAME}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
    return calls

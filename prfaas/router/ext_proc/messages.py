"""Messages of Envoy's external-processing protocol: readers and builders."""

from collections.abc import Iterator, Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from prfaas.router.ext_proc.endpoint_choice import DESTINATION, OWN_HEADERS, SUBSET

CHUNK_BYTES = 62_000  # Envoy accepts no larger chunk of a body.
_LOAD_BALANCER, _SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"


def headers_of(message: Any) -> dict[str, str]:
    """Return the header values by lower-case name. The last of several values counts."""
    return {
        header.key.lower(): (header.raw_value.decode("latin-1") or header.value) for header in message.headers.headers
    }


def subset_of(request: Any) -> frozenset[str] | None:
    """Return the addresses (host:port) to which the gateway limits the choice; None without a limit."""
    hint = request.metadata_context.filter_metadata.get(_SUBSET_HINT)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = [item.string_value for item in value.list_value.values] if value.HasField("list_value") else []
    return frozenset(item.strip() for item in listed or value.string_value.split(",") if item.strip())


def unchanged(phase: str) -> Any:
    """Return the response that changes nothing in this phase."""
    response = pb.ProcessingResponse()
    getattr(response, phase).SetInParent()
    return response


def with_headers(phase: str, headers: Mapping[str, str]) -> Any:
    """Return the response that sets headers."""
    response = pb.ProcessingResponse()
    common = getattr(response, phase).response
    for name, value in headers.items():
        option = common.header_mutation.set_headers.add(
            append_action=base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
        )
        option.header.key, option.header.raw_value = name, value.encode()
    return response


def send_to(phase: str, headers: Mapping[str, str]) -> Any:
    """Return the response that sends the request to the destination in `headers`."""
    response = with_headers(phase, headers)
    common = getattr(response, phase).response
    common.header_mutation.remove_headers.extend(name for name in OWN_HEADERS if name not in headers)
    common.clear_route_cache = True
    destination = struct_pb2.Struct()
    destination.update({DESTINATION: headers[DESTINATION]})
    response.dynamic_metadata.update({_LOAD_BALANCER: {}})
    response.dynamic_metadata.fields[_LOAD_BALANCER].struct_value.CopyFrom(destination)
    return response


def body_chunks(phase: str, body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield the responses that return a body in chunks. The last chunk ends the body if `ends`."""
    starts = range(0, max(1, len(body)), CHUNK_BYTES)
    for start in starts:
        response = pb.ProcessingResponse()
        streamed = getattr(response, phase).response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = ends and start == starts[-1]
        yield response


def refuse(status: int, body: bytes, headers: Mapping[str, str]) -> Any:
    """Return the response that answers the client in the engine's place."""
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = body
    for name, value in headers.items():
        option = response.immediate_response.headers.set_headers.add()
        option.header.key, option.header.raw_value = name, value.encode()
    return response

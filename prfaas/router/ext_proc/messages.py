"""Envoy's external-processing messages, read and built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from prfaas.router.ext_proc.endpoint_choice import DESTINATION, OWN_HEADERS, SUBSET

CHUNK_BYTES = 62_000  # of a body that is given back: Envoy takes no more at once
_LOAD_BALANCER, _SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
_PHASES = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)


def headers_of(message: Any) -> dict[str, str]:
    """Header names, in small letters, and their values; of several the last."""
    return {
        header.key.lower(): (header.raw_value.decode("latin-1") or header.value) for header in message.headers.headers
    }


def subset_of(request: Any) -> frozenset[str] | None:
    """Return the host:ports that the gateway leaves to choose from; None when it says nothing."""
    hint = request.metadata_context.filter_metadata.get(_SUBSET_HINT)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = [one.string_value for one in value.list_value.values] if value.HasField("list_value") else []
    return frozenset(one.strip() for one in listed or value.string_value.split(",") if one.strip())


def go_on(phase: str) -> Any:
    """Nothing to change in this phase."""
    answer = pb.ProcessingResponse()
    getattr(answer, phase).SetInParent()
    return answer


def with_headers(phase: str, headers: Mapping[str, str]) -> Any:
    """Go on with these headers."""
    answer = pb.ProcessingResponse()
    common = getattr(answer, phase).response
    for name, value in headers.items():
        option = common.header_mutation.set_headers.add(
            append_action=base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
        )
        option.header.key, option.header.raw_value = name, value.encode()
    return answer


def send_to(phase: str, headers: Mapping[str, str], *, body: bytes | None = None) -> Any:
    """Send the request on with these headers, to the destination that they name; `body` takes the place of its own."""
    answer = with_headers(phase, headers)
    common = getattr(answer, phase).response
    common.header_mutation.remove_headers.extend(name for name in OWN_HEADERS if name not in headers)
    common.clear_route_cache = True
    if body is not None:
        common.body_mutation.body = body
    destination = struct_pb2.Struct()
    destination.update({DESTINATION: headers[DESTINATION]})
    answer.dynamic_metadata.update({_LOAD_BALANCER: {}})
    answer.dynamic_metadata.fields[_LOAD_BALANCER].struct_value.CopyFrom(destination)
    return answer


def pieces(phase: str, body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield a body given back in pieces; the last one ends it where the phase `ends` with it."""
    starts = range(0, max(1, len(body)), CHUNK_BYTES)
    for start in starts:
        answer = pb.ProcessingResponse()
        streamed = getattr(answer, phase).response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = ends and start == starts[-1]
        yield answer


def refuse(status: int, body: bytes, headers: Mapping[str, str]) -> Any:
    """Answer the client in the engine's place."""
    answer = pb.ProcessingResponse()
    answer.immediate_response.status.code = status
    answer.immediate_response.body = body
    for name, value in headers.items():
        option = answer.immediate_response.headers.set_headers.add()
        option.header.key, option.header.raw_value = name, value.encode()
    return answer


def phase_of(request: Any) -> str | None:
    """Return which phase a message belongs to."""
    phase: str | None = request.WhichOneof("request")
    return phase if phase in _PHASES else None

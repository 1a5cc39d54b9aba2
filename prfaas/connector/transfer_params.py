"""Engine requests, and the transfers that their parameters ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas import grants
from prfaas.connector.metadata import Direction, Outcome
from prfaas.errors import GrantError
from prfaas.grants import Grant
from prfaas.hashing import HashChain
from prfaas.tracing import is_traceparent

GRANT_KEY = "prfaas_grant"
PROMISED_KEY = "prfaas_promised_tokens"  # Cached tokens that the router's decision counted on.
TRACE_KEY = "prfaas_trace"  # Traceparent of the leg if the router records spans.
_DIRECTIONS: dict[str, Direction] = {"do_remote_decode": "send", "do_remote_prefill": "receive"}
_MAX_PROMISED_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class EngineRequest:
    """Request as any engine can describe it.

    Attributes:
        chain: Hashes the prompt for a tenant. None means that no hash covers the extras of the request.
        salt: The request's own salt (`cache_salt`), in which the router names the tenant.
        excluded: Reason why the engine neither loads nor sends KV for the request, whatever its parameters say.
        priority: A lower value is more urgent; 0 is the default.
    """

    request_id: str
    num_prompt_tokens: int
    parameters: Mapping[str, Any]
    chain: Callable[[str], HashChain | None]
    salt: str = ""
    excluded: Outcome | None = None
    priority: int = 0


@dataclass(frozen=True)
class RequestedTransfer:
    """Transfer that the parameters of a request ask for. The agent verifies `token`; the connector only reads it."""

    direction: Direction
    token: bytes
    grant: Grant
    trace: str = ""


def direction_of(parameters: Mapping[str, Any]) -> Direction | None:
    """Return the direction of the requested transfer. Parameters without a grant belong to another connector."""
    if GRANT_KEY not in parameters:
        return None
    return next((direction for key, direction in _DIRECTIONS.items() if parameters.get(key) is True), None)


def uses_other_connector(parameters: Mapping[str, Any]) -> bool:
    """Return whether another connector loads the KV of the request."""
    return parameters.get("do_remote_prefill") is True and GRANT_KEY not in parameters


def without_direction(parameters: Mapping[str, Any], direction: Direction) -> dict[str, Any]:
    """Return the parameters as other connectors may see them: a transfer with a grant is none of theirs."""
    is_hidden = GRANT_KEY in parameters
    return {key: value for key, value in parameters.items() if not is_hidden or _DIRECTIONS.get(key) != direction}


def read_parameters(request: EngineRequest, direction: Direction) -> RequestedTransfer | None:
    """Return the transfer that the request asks for, or None if its grant cannot be read."""
    found = _grant(request.parameters)
    if found is None:
        return None
    trace = request.parameters.get(TRACE_KEY)
    return RequestedTransfer(direction, *found, trace if isinstance(trace, str) and is_traceparent(trace) else "")


def _grant(parameters: Mapping[str, Any]) -> tuple[bytes, Grant] | None:
    """Return the grant with its signature, and without, or None if it cannot be read."""
    text = parameters.get(GRANT_KEY)
    try:
        token = grants.from_text(text) if isinstance(text, str) else b""
        return token, grants.unverified(token)
    except GrantError:
        return None


def refusal_reason(request: EngineRequest, transfer: RequestedTransfer) -> Outcome | None:
    """Return why the request cannot have its transfer, or None.

    The grant covers the whole prompt of the prefill leg. The decode leg has one token more, which it computes itself.
    """
    if request.excluded is not None:
        return request.excluded
    num_tokens = request.num_prompt_tokens - (transfer.direction == "receive")
    return None if transfer.grant.num_tokens == num_tokens > 0 else "wrong_length"


def tenant_of(parameters: Mapping[str, Any], salt: str | None, *, default: str) -> str:
    """Return the tenant whose salt is in the request's hashes: from the grant, else the request's salt, else `default`."""
    found = _grant(parameters)
    return found[1].tenant if found is not None else salt or default


def promised_tokens(parameters: Mapping[str, Any]) -> int:
    """Return how many cached tokens the router's decision counted on, or 0 if unknown."""
    promised = parameters.get(PROMISED_KEY)
    if not isinstance(promised, int) or isinstance(promised, bool):
        return 0
    return promised if 0 < promised <= _MAX_PROMISED_TOKENS else 0

"""What the connector needs to know of an engine's request, and the transfer that its parameters ask for."""

from __future__ import annotations

import contextlib
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
SENT_KEY = "prfaas_sent"  # in a prefill leg's answer: how its transfer stands, "completed" when all of it is on its way
PROMISED_KEY = "prfaas_promised_tokens"  # cached tokens that the router's decision counted on
TRACE_KEY = "prfaas_trace"  # traceparent of the leg, where the router makes spans
_DIRECTIONS: dict[str, Direction] = {"do_remote_decode": "send", "do_remote_prefill": "receive"}


@dataclass(frozen=True)
class EngineRequest:
    """A request as any engine can describe it. `chain(tenant)` hashes the prompt; None when no hash covers its extras.

    `salt`: the engine's own for this request (`cache_salt`), in which the router names the tenant. `excluded`: why no KV is
    loaded or sent for it, whatever its parameters ask for. A lower `priority` is more urgent; 0 is the ordinary one.
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
    """A transfer that a request's parameters ask for. The agent verifies `token`; here it is only read."""

    direction: Direction
    token: bytes
    grant: Grant
    trace: str = ""


def direction_of(parameters: Mapping[str, Any]) -> Direction | None:
    """Whether these parameters ask for a transfer, and which way. Without a grant they are another connector's."""
    if GRANT_KEY not in parameters:
        return None
    return next((direction for key, direction in _DIRECTIONS.items() if parameters.get(key) is True), None)


def uses_other_connector(parameters: Mapping[str, Any]) -> bool:
    """Whether another connector brings the request's KV."""
    return parameters.get("do_remote_prefill") is True and GRANT_KEY not in parameters


def without_direction(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """These parameters for whoever else reads them: of a transfer with a grant nothing that makes it another connector's."""
    return {key: its for key, its in parameters.items() if GRANT_KEY not in parameters or key not in _DIRECTIONS}


def read_parameters(request: EngineRequest, direction: Direction) -> RequestedTransfer | None:
    """The transfer that the request asks for; None when its grant cannot be read."""
    text = request.parameters.get(GRANT_KEY)
    if not isinstance(text, str):
        return None
    try:
        token = grants.from_text(text)
        grant = grants.unverified(token)
    except GrantError:
        return None
    trace = request.parameters.get(TRACE_KEY)
    return RequestedTransfer(direction, token, grant, trace if isinstance(trace, str) and is_traceparent(trace) else "")


def refusal_reason(request: EngineRequest, asked: RequestedTransfer) -> Outcome | None:
    """Why the request cannot have the transfer that it asks for; None when it can.

    The prefill leg's prompt is the granted one; the decode leg's has one token more, which it computes itself.
    """
    if request.excluded is not None:
        return request.excluded
    num_tokens = request.num_prompt_tokens - (asked.direction == "receive")
    return None if asked.grant.num_tokens == num_tokens > 0 else "wrong_length"


def tenant_of(parameters: Mapping[str, Any], salt: str | None, *, default: str) -> str:
    """The tenant whose salt the request's hashes carry: that of a readable grant, the request's own, else the engine's."""
    text = parameters.get(GRANT_KEY)
    if isinstance(text, str):
        with contextlib.suppress(GrantError):
            return grants.unverified(grants.from_text(text)).tenant
    return salt or default


def promised_tokens(parameters: Mapping[str, Any]) -> int:
    """How many tokens of the prompt the router's decision took for cached here; 0 when it did not say."""
    promised = parameters.get(PROMISED_KEY)
    return promised if isinstance(promised, int) and not isinstance(promised, bool) and 0 < promised < 1 << 31 else 0

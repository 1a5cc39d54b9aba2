"""Reports of engines on their transfers, in the responses to the router's legs.

The response to a prefill leg has `kv_transfer_params` with `SENT_KEY`: the outcome at the sender. It is "completed" once
all of the KV is on its way.

The response to a decode leg reports the outcome at the receiver, which is final. Without streaming, `kv_transfer_params`
has `RECEIVED_KEY`. A stream has the same object in a comment line before its last event:

    : prfaas {"prfaas_received": {"transfer_id": "6f...", "outcome": "completed", "num_tokens": 24576}}

    data: [DONE]

A reason other than "completed" says why the engine computed the prompt, or a part of it. "held" means that it needed
nothing. A response without a report comes from an engine without this connector, or the request was aborted.

A router that gives the transfer up first sends the prompt again, with `FALLBACK_KEY`: the transfer's id and its own reason.
The engine records that reason and reports it as the outcome.
"""

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from prfaas.types import LegReason, TransferId, TransferOutcome

SENT_KEY = "prfaas_sent"
RECEIVED_KEY = "prfaas_received"
FALLBACK_KEY = "prfaas_fallback"
COMMENT_START = b": prfaas "
MAX_COMMENT_BYTES = 1024
REASONS: frozenset[str] = frozenset(typing.get_args(LegReason))
OUTCOMES: frozenset[str] = REASONS.union(
    word for literal in typing.get_args(TransferOutcome) for word in (typing.get_args(literal) or (literal,))
)
MAX_ID_CHARS = 64


@dataclass(frozen=True)
class ReceivedReport:
    """Outcome of one transfer at its receiving engine. `num_tokens` came from the sender; 0 unless completed."""

    transfer_id: str  # Hexadecimal.
    outcome: TransferOutcome | LegReason
    num_tokens: int = 0

    def to_params(self) -> dict[str, Any]:
        """Return the report as a part of `kv_transfer_params`."""
        fields = {"transfer_id": self.transfer_id, "outcome": self.outcome, "num_tokens": self.num_tokens}
        return {RECEIVED_KEY: fields}


def fallback_params(transfer_id: TransferId, reason: LegReason) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a request whose transfer the router has given up."""
    return {FALLBACK_KEY: {"transfer_id": transfer_id.hex(), "reason": reason}}


def fallback_report(params: Mapping[str, Any]) -> ReceivedReport | None:
    """Return the report on a transfer that the router has given up, or None if there is none of a known form."""
    fields = params.get(FALLBACK_KEY)
    if not isinstance(fields, Mapping):
        return None
    transfer_id, reason = fields.get("transfer_id"), fields.get("reason")
    is_known = isinstance(reason, str) and reason in REASONS
    if not is_known or not isinstance(transfer_id, str) or len(transfer_id) > MAX_ID_CHARS:
        return None
    return ReceivedReport(transfer_id, cast("LegReason", reason))


def received_report(params: object) -> ReceivedReport | None:
    """Return the report in `kv_transfer_params`, or None if there is none of a known form."""
    fields = params.get(RECEIVED_KEY) if isinstance(params, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    transfer_id, outcome, num_tokens = (fields.get(key) for key in ("transfer_id", "outcome", "num_tokens"))
    is_known = isinstance(outcome, str) and outcome in OUTCOMES
    if not is_known or not isinstance(transfer_id, str) or not isinstance(num_tokens, int):
        return None
    return ReceivedReport(transfer_id, cast("TransferOutcome | LegReason", outcome), num_tokens)


def to_comment(params: Mapping[str, Any]) -> str:
    """Return the comment of an event stream that has the report of these `kv_transfer_params`; empty without a report."""
    fields = params.get(RECEIVED_KEY)
    return f"{COMMENT_START.decode()}{json.dumps({RECEIVED_KEY: fields})}\n\n" if fields else ""


def take_comment(chunk: bytes) -> tuple[bytes, ReceivedReport | None]:
    """Return a part of an event stream without the report's comment, and the report.

    The comment is found if it lies in the part as a whole, as an engine writes it.
    """
    start = chunk.find(COMMENT_START)
    end = chunk.find(b"\n\n", start)
    if start < 0 or end < 0 or end - start > MAX_COMMENT_BYTES or (start and chunk[start - 1 : start] != b"\n"):
        return chunk, None
    try:
        report = received_report(json.loads(chunk[start + len(COMMENT_START) : end]))
    except ValueError:
        return chunk, None
    return chunk[:start] + chunk[end + 2 :], report

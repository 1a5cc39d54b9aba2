"""How a request's transfer ended, as this engine saw it: closed words for logs and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from prfaas.types import FailureReason

Direction = Literal["send", "receive"]
Source = Literal["receive", "reuse"]  # where loaded KV comes from: another agent, or blocks that this node's pool holds
Counted = Literal["send", "receive", "reuse", "store", "checkpoint"]
Outcome = (
    FailureReason
    | Literal[
        "completed",  # sent: every layer was handed to the agent; received: loaded into the engine's blocks
        "no_grant",  # the request's parameters carry no grant, or one that cannot be read
        "wrong_role",  # this engine's kv_role does not send, or does not receive
        "wrong_length",  # the prompt is not as long as the granted one
        "unhashable",  # the request has extras that no hash covers
        "rejected",  # the engine's API refused the request, or its client left before a whole answer
        "whole_prompt",  # the engine computes all of the prompt, for its log-probabilities
        "in_use",  # another request of this engine has this transfer
        "agent_slow",  # no answer within `open_wait_seconds`, or none to an earlier question either
        "agent_lost",  # the agent went away
        "timeout",  # nothing came within `receive_timeout_seconds` or, of this node's pool, `hold_wait_seconds`
        "held",  # the engine's own prefix cache covers the whole transfer
        "overwritten",  # a slot was given to another block while it was read
        "no_prefix",  # this node's pool holds nothing of the prompt that the engine's own cache does not
        "aborted",  # the request ended before its transfer
        "reset",  # the engine was told to forget what was computed before
    ]
)


@dataclass
class Tally:
    """Counts since they were last taken."""

    transfers: Counter[tuple[Counted, str]] = field(default_factory=Counter)
    copied_bytes: Counter[Direction] = field(default_factory=Counter)
    state_tail_bytes: int = 0  # states that left after the forward pass, for want of a hook at their layer's end
    ring_overflows: int = 0  # steps that found entries that the agent's ring had had no room for

    def take(self) -> Tally:
        """These counts; the tally starts at zero again."""
        taken = Tally(self.transfers.copy(), self.copied_bytes.copy(), self.state_tail_bytes, self.ring_overflows)
        self.transfers.clear()
        self.copied_bytes.clear()
        self.state_tail_bytes = self.ring_overflows = 0
        return taken

    def __bool__(self) -> bool:
        return bool(self.transfers or self.copied_bytes or self.state_tail_bytes or self.ring_overflows)

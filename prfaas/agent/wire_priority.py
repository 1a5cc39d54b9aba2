"""How urgent a transfer is on the wire, by the priority of the request that it is for."""

from __future__ import annotations

from prfaas.transport.chunker import MAX_PRIORITY

ORDINARY = 3  # of a request that names none: there are three steps above it and four below


def wire_priority(priority: int) -> int:
    """As in vLLM a lower one is more urgent and 0 the ordinary one; beyond three steps up and four down all are alike."""
    return min(max(ORDINARY + priority, 0), MAX_PRIORITY)

"""Grants of transfers, as a router signs them."""

import os
import time
from dataclasses import replace
from typing import Any, Protocol

from prfaas.grants import Grant
from prfaas.hashing import HashChain
from prfaas.types import AgentName, TransferId

GRANT_SECONDS = 60.0


class Destination(Protocol):
    """An agent that receives."""

    @property
    def name(self) -> str: ...

    @property
    def wire(self) -> str: ...


def make_grant(source: str, destination: Destination, chain: HashChain, /, **changes: Any) -> Grant:
    """Return a grant for all tokens of a chain. `changes` has other values of fields."""
    grant = Grant(
        transfer_id=TransferId(os.urandom(16)),
        source=AgentName(source),
        destination=AgentName(destination.name),
        destination_address=destination.wire,
        prompt_hash=chain.at(chain.num_tokens),
        num_tokens=chain.num_tokens,
        max_bytes=1 << 28,
        tenant="",
        expires_at=time.time() + GRANT_SECONDS,
    )
    return replace(grant, **changes)

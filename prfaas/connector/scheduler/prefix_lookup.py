"""Requests that may begin with what this node's pool holds: asked before they are first run, answered within a moment.

asked ──LookedUp: a length that our tokens confirm──▶ held (see incoming.py)
asked ──LookedUp: nothing──▶ gone
asked ──no answer in time──▶ gone: the engine computes the prompt itself
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prfaas.agent.engine.protocol import LookedUp, Lookup, Message, Promised
from prfaas.connector.metadata import Counts, Outcome
from prfaas.connector.scheduler.receive import InboundTransfers
from prfaas.hashing import HashChain
from prfaas.types import BlockHash, TransferId


@dataclass(eq=False)
class PrefixLookup:
    """What the agent was asked of one request's prompt."""

    request_id: str
    transfer_id: TransferId
    chain: HashChain
    ask_until: float  # monotonic seconds
    promised_tokens: int
    lengths: list[int] | None = None  # what the pool can serve of this very prompt, longest first
    held_tokens: list[list[Any]] | None = None  # by kind of KV group, where that is less than was promised


class PrefixLookups:
    """All lookups of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(self, incoming: InboundTransfers, *, post: Callable[[Message], None], tally: Counts) -> None:
        self._incoming = incoming
        self._post = post
        self._tally = tally
        self._by_request: dict[str, PrefixLookup] = {}
        self._by_transfer: dict[TransferId, PrefixLookup] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, request_id: str, chain: HashChain, *, promised_tokens: int, ask_until: float) -> None:
        """Ask how much of the prompt, its last token left out, the pool holds; a decision counted on `promised_tokens`."""
        asked = PrefixLookup(request_id, TransferId(os.urandom(16)), chain, ask_until, promised_tokens)
        self._by_request[request_id] = asked
        self._by_transfer[asked.transfer_id] = asked
        units = b"".join(chain.units)
        self._post(Lookup(asked.transfer_id, chain.root, units, chain.num_tokens - 1, promised_tokens))

    def on_message(self, message: LookedUp) -> None:
        """Keep the lengths whose hash is that of our tokens."""
        asked = self._by_transfer.get(message.transfer_id)
        if asked is not None:
            asked.lengths = [length for length, its in message.lengths if _confirms(asked.chain, length, its)]
            asked.held_tokens = message.held_tokens

    def num_offered_tokens(self, request_id: str) -> int | None:
        """What the pool can serve at most, None where that is not known."""
        asked = self._by_request.get(request_id)
        return None if asked is None or asked.lengths is None else max([0, *asked.lengths])

    def is_undecided(self, request_id: str, local_tokens: int, *, now: float) -> bool:
        """Whether the request should wait for the answer; once it is there the best prefix is held, if it is of use."""
        asked = self._by_request.get(request_id)
        if asked is None:
            return False
        if asked.lengths is None and now < asked.ask_until:
            return True
        best = max(asked.lengths or [0])
        if asked.promised_tokens:
            found = max(best, local_tokens)
            held_tokens = asked.held_tokens if found < asked.promised_tokens else None
            self._post(Promised(asked.promised_tokens, found, held_tokens))
        if best > local_tokens:
            self._forget(asked)
            self._incoming.hold(request_id, asked.transfer_id, asked.chain, num_tokens=best, now=now)
        else:
            self._end(asked, "agent_slow" if asked.lengths is None else "no_prefix")
        return False

    def end(self, request_id: str) -> None:
        """The request has ended."""
        asked = self._by_request.get(request_id)
        if asked is not None:
            self._end(asked, "aborted")

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it."""
        for asked in list(self._by_request.values()):
            self._end(asked, reason)

    def _end(self, asked: PrefixLookup, outcome: Outcome) -> None:
        self._forget(asked)
        self._tally.transfers["reuse", outcome] += 1

    def _forget(self, asked: PrefixLookup) -> None:
        del self._by_request[asked.request_id]
        del self._by_transfer[asked.transfer_id]


def _confirms(chain: HashChain, length: object, its: object) -> bool:
    """Whether the pool's block at `length` is of our prompt and not of one that only begins alike."""
    return isinstance(length, int) and 0 < length < chain.num_tokens and chain.at(length) == BlockHash(its)  # type: ignore[arg-type]

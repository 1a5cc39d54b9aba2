"""Lookups of prompts in this node's pool, before their requests first run.

asked ──LookedUp: a length that the prompt confirms──▶ held (see receive.py)
asked ──LookedUp: nothing──▶ gone
asked ──no reply in time──▶ gone: the engine computes the prompt

vLLM's own cache may hold attention beyond its states. vLLM counts such attention as computed, and takes from a connector
only what reaches beyond it. If nothing does, vLLM falls back to the prefix that all its groups hold. It does not ask what
the connector has beyond that prefix, such as a checkpoint inside the prompt. So the connector has vLLM ask again, with the
prefix that all groups hold.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.agent.engine.protocol import LookedUp, Lookup, Message, Promised
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Outcome
from prfaas.connector.scheduler.receive import InboundTransfers
from prfaas.connector.scheduler.transfer_table import RequestTransfer, TransferTable
from prfaas.hashing import HashChain
from prfaas.types import BlockHash, TransferId


@dataclass(eq=False)
class PrefixLookup(RequestTransfer):
    """Lookup of one request's prompt.

    Attributes:
        reply_deadline: Monotonic seconds.
        promised_tokens: Cached tokens that the router's decision counted on.
        lengths: Lengths of this prompt that the pool can serve; None until the agent has replied.
    """

    chain: HashChain
    reply_deadline: float
    promised_tokens: int
    lengths: list[int] | None = None


class PrefixLookups(TransferTable[PrefixLookup]):
    """All lookups of one engine."""

    def __init__(
        self,
        inbound: InboundTransfers,
        *,
        post: Callable[[Message], None],
        counts: Counts,
        has_one_attention: bool = False,
    ) -> None:
        """Create an empty table. With `has_one_attention` a load completes all that the engine's groups lack."""
        super().__init__(post=post, counts=counts)
        self._inbound = inbound
        self._has_one_attention = has_one_attention
        self.asked_again: set[str] = set()  # Requests that vLLM must look up by the prefix that all its groups hold.

    def begin(self, request_id: str, chain: HashChain, *, promised_tokens: int, reply_deadline: float) -> None:
        """Ask how much of the prompt the pool holds. The engine always computes the last token."""
        lookup = PrefixLookup(request_id, TransferId(os.urandom(16)), chain, reply_deadline, promised_tokens)
        self._add(lookup)
        units = b"".join(chain.units)
        self._post(Lookup(lookup.transfer_id, chain.root, units, chain.num_tokens - 1))

    def on_message(self, message: LookedUp) -> None:
        """Keep the lengths at which the pool's block belongs to this prompt, not to a similar one."""
        lookup = self.of_transfer(message.transfer_id)
        if lookup is not None:
            chain, lookup.lengths = lookup.chain, []
            for length, block_hash in message.lengths:
                if 0 < length < chain.num_tokens and chain.at(length) == BlockHash(block_hash):
                    lookup.lengths.append(length)

    @property
    def allow_divergent_hits(self) -> bool:
        """True if the engine may count attention beyond its states."""
        return self._has_one_attention and not self.asked_again

    def must_ask_again(self, request_id: str, local_tokens: int, agreed_tokens: Callable[[], int]) -> bool:
        """Return whether the engine must ask for this request again, by the prefix `agreed_tokens()` of all its groups.

        After it has, its answer is accepted, so that no request waits for ever.
        """
        if request_id in self.asked_again:
            self.asked_again.discard(request_id)
            return False
        lookup, offered = self.of_request(request_id), self._inbound.offered_tokens(request_id)
        if offered is None and lookup is not None and lookup.lengths is not None:
            offered = max([0, *lookup.lengths])
        reaches_beyond = offered is None or offered > local_tokens
        if not self._has_one_attention or reaches_beyond or agreed_tokens() >= local_tokens:
            return False
        self.asked_again.add(request_id)
        return True

    def is_undecided(self, request_id: str, local_tokens: int, *, now: float) -> bool:
        """Return whether the request should wait for the reply. After the reply, claim the best prefix if it is useful."""
        lookup = self.of_request(request_id)
        if lookup is None:
            return False
        if lookup.lengths is None and now < lookup.reply_deadline:
            return True
        best = max(lookup.lengths or [0])
        if lookup.promised_tokens:
            self._post(Promised(lookup.promised_tokens, max(best, local_tokens)))
        if best > local_tokens:
            self._remove(lookup)
            self._inbound.hold(request_id, lookup.transfer_id, lookup.chain, num_tokens=best, now=now)
        else:
            self._end(lookup, "agent_silent" if lookup.lengths is None else "no_prefix")
        return False

    def end(self, request_id: str) -> None:
        """End the lookup of a request that has ended."""
        self.asked_again.discard(request_id)
        lookup = self.of_request(request_id)
        if lookup is not None:
            self._end(lookup, "aborted")

    def _end(self, lookup: PrefixLookup, outcome: Outcome) -> None:
        self._remove(lookup)
        self._counts.add_transfer("reuse", outcome)

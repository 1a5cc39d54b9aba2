"""Blocks that a finished request leaves in the agent's pool: prompt and answer, with the state after them.

asked ──SendOpened──▶ copying (one step) ──workers are done──▶ gone: the engine frees its blocks
asked ──TransferFailed, no answer in time──▶ gone likewise
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.protocol import Cancel, Message, SendOpened, Store, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.outcomes import Outcome, Tally
from prfaas.connector.outgoing import with_slots
from prfaas.connector.steps import Save
from prfaas.hashing import HashChain
from prfaas.types import TransferId

_log = logs.get("connector.leftovers")


@dataclass(eq=False)
class Leftover:
    """One finished request whose engine blocks are kept until they are copied."""

    request_id: str
    transfer_id: TransferId
    num_tokens: int
    tables: Sequence[Sequence[int]]
    ask_until: float  # monotonic seconds
    opened: SendOpened | None = None
    failed: Outcome | None = None


class Leftovers:
    """All of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(
        self, block_map: BlockMap, *, wait_seconds: float, post: Callable[[Message], None], tally: Tally
    ) -> None:
        self._map = block_map
        self._wait_seconds = wait_seconds
        self._post = post
        self._tally = tally
        self._by_transfer: dict[TransferId, Leftover] = {}
        self._copying: dict[str, Leftover] = {}

    def __len__(self) -> int:
        return len(self._by_transfer) + len(self._copying)

    def begin(self, request_id: str, chain: HashChain, tables: Sequence[Sequence[int]], *, now: float) -> None:
        """A request has computed all of `chain`; its block ids, `tables[group]`, stay its own until they are copied."""
        transfer_id = TransferId(os.urandom(16))
        kept = [list(table) for table in tables]
        its = Leftover(request_id, transfer_id, chain.num_tokens, kept, now + self._wait_seconds)
        self._by_transfer[transfer_id] = its
        self._post(Store(transfer_id, chain.num_tokens, self._map.transfer_groups(chain, chain.num_tokens)))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        its = self._by_transfer.get(message.transfer_id)
        if its is None:
            return
        if isinstance(message, SendOpened):
            its.opened = message
        else:
            its.failed = message.reason

    def saves(self, *, now: float) -> list[Save]:
        """What the workers copy in this step; a request that is not to be stored is only released."""
        saves = []
        for its in list(self._by_transfer.values()):
            if its.opened is None and its.failed is None and now < its.ask_until:
                continue
            del self._by_transfer[its.transfer_id]
            self._copying[its.request_id] = its
            saves.append(self._save(its))
        return saves

    def _save(self, its: Leftover) -> Save:
        if its.opened is None or its.failed is not None:
            its.failed = its.failed or "agent_slow"
            self._post(Cancel(its.transfer_id))
            return Save(0, True, (), release=its.request_id, is_sent=False)
        spans = self._map.filled(its.tables, its.num_tokens, saved_tokens=0, computed_tokens=its.num_tokens)
        slots = tuple(with_slots(span, its.opened) for span in spans)
        return Save(its.opened.handle, True, slots, release=its.request_id, is_sent=False)

    def released(self, request_id: str) -> None:
        """Every worker has made the copy; the engine frees the blocks."""
        its = self._copying.pop(request_id, None)
        if its is not None:
            outcome: Outcome = its.failed or "completed"
            self._tally.transfers["store", outcome] += 1
            _log.info("request.stored", request_id=request_id, outcome=outcome, num_tokens=its.num_tokens)

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it; the blocks are released with the next step."""
        for its in self._by_transfer.values():
            its.failed = its.failed or reason

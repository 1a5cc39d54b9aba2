"""Blocks that a finished request leaves in the agent's pool: prompt and answer, with the state after them.

asked ──SendOpened──▶ copying (one step) ──workers are done──▶ gone: the engine frees its blocks
asked ──TransferFailed, no answer in time──▶ gone likewise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.protocol import Message, SendOpened, TransferFailed
from prfaas.connector.asked_stores import AskedStore, AskedStores
from prfaas.connector.block_map import BlockMap
from prfaas.connector.outcomes import Outcome, Tally
from prfaas.connector.steps import Save, SlotSpan
from prfaas.hashing import HashChain

_log = logs.get("connector.leftovers")


@dataclass(eq=False, kw_only=True)
class Leftover(AskedStore):
    """One finished request whose engine blocks are kept until they are copied."""

    tables: Sequence[Sequence[int]]


class Leftovers:
    """All of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(self, block_map: BlockMap, *, post: Callable[[Message], None], tally: Tally) -> None:
        self._map = block_map
        self._tally = tally
        self._asked: AskedStores[Leftover] = AskedStores(post)
        self._copying: dict[str, Leftover] = {}

    def __len__(self) -> int:
        return len(self._asked) + len(self._copying)

    def begin(self, request_id: str, chain: HashChain, tables: Sequence[Sequence[int]], *, ask_until: float) -> None:
        """A request has computed all of `chain`; its block ids, `tables[group]`, stay its own until they are copied."""
        kept = [list(table) for table in tables]
        its = Leftover(request_id=request_id, num_tokens=chain.num_tokens, ask_until=ask_until, tables=kept)
        self._asked.ask(its, self._map.transfer_groups(chain, chain.num_tokens))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        self._asked.on_message(message)

    def saves(self, *, now: float) -> list[Save]:
        """What the workers copy in this step; a request that is not to be stored is only released."""
        answered = self._asked.take_answered(now=now)
        self._copying |= {its.request_id: its for its in answered}
        return [self._save(its) for its in answered]

    def _save(self, its: Leftover) -> Save:
        if its.opened is None or its.failed is not None:
            return Save(0, True, (), release=its.request_id, is_sent=False)
        spans = self._map.filled(its.tables, its.num_tokens, saved_tokens=0, computed_tokens=its.num_tokens)
        slots = tuple(SlotSpan.of(span, its.opened.slots) for span in spans)
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
        self._asked.fail_all(reason)

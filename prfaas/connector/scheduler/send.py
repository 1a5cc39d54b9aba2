"""Outbound transfers of the scheduler side. Slots are requested early; blocks are copied as steps make them final.

requested ──SendOpened──▶ open ──last token computed──▶ saved ──request ends──▶ gone
requested ──no reply in time──▶ given up (Cancel)
open ──aborted, failed──▶ given up: the workers report their end; Cancel if they never copied
"""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.engine.protocol import Cancel, Message, Send, SendOpened, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Outcome, Save, SlotSpan, Tables
from prfaas.connector.scheduler.transfer_table import RequestTransfer, TransferTable
from prfaas.connector.transfer_params import EngineRequest, RequestedTransfer
from prfaas.hashing import HashChain

_log = logs.get("connector.outbound")


@dataclass(eq=False)
class OutboundTransfer(RequestTransfer):
    """Transfer of a prefill leg. `opened` is the agent's reply; earlier steps have copied `saved_tokens`."""

    num_tokens: int
    reply_deadline: float  # Monotonic seconds.
    opened: SendOpened | None = None
    saved_tokens: int = 0


class OutboundTransfers(TransferTable[OutboundTransfer]):
    """All outbound transfers of one engine."""

    def __init__(self, block_map: BlockMap, *, post: Callable[[Message], None], counts: Counts) -> None:
        super().__init__(post=post, counts=counts)
        self._map = block_map
        self._ends: list[int] = []
        self.outcomes: dict[str, Outcome] = {}  # Of requests that still run, whose transfer was refused or has ended.

    @property
    def has_work(self) -> bool:
        """True if the next step must handle a transfer or the end of one."""
        return bool(self._by_request or self._ends)

    def begin(
        self, request: EngineRequest, transfer: RequestedTransfer, chain: HashChain, *, reply_deadline: float
    ) -> None:
        """Ask the agent for slots."""
        grant = transfer.grant
        groups = self._map.transfer_groups(chain, grant.num_tokens)
        self._add(OutboundTransfer(request.request_id, grant.transfer_id, grant.num_tokens, reply_deadline))
        self._post(Send(grant.transfer_id, transfer.token, groups, transfer.trace, request.priority))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        """Handle the agent's reply, or the failure of a transfer."""
        transfer = self.of_transfer(message.transfer_id)
        if transfer is None:
            return
        if isinstance(message, SendOpened):
            transfer.opened = message
        else:
            self._end(transfer, message.reason, message=message.message)

    def is_undecided(self, request_id: str, *, now: float) -> bool:
        """Return whether the request should wait for its slots. Late transfers are given up."""
        transfer = self.of_request(request_id)
        if transfer is None or transfer.opened is not None:
            return False
        if now < transfer.reply_deadline:
            return True
        self._end(transfer, "agent_silent")
        return False

    def save(self, request_id: str, computed_tokens: int, tables: Tables) -> Save | None:
        """Return the blocks to copy in a step that ends with `computed_tokens`."""
        transfer = self.of_request(request_id)
        if transfer is None or transfer.saved_tokens >= transfer.num_tokens:
            return None
        if transfer.opened is None:
            # The engine scheduled the request without asking, so there are no slots to copy to.
            self._end(transfer, "agent_silent")
            return None
        saved = transfer.saved_tokens
        if computed_tokens <= saved:
            # The engine preempted the request and computes again what has been copied.
            return None
        spans = self._map.filled(tables(), transfer.num_tokens, saved_tokens=saved, computed_tokens=computed_tokens)
        transfer.saved_tokens = min(computed_tokens, transfer.num_tokens)
        is_last = transfer.saved_tokens == transfer.num_tokens
        slots = transfer.opened.slots
        return Save(transfer.opened.handle, is_last, tuple(SlotSpan.of(span, slots) for span in spans))

    def end(self, request_id: str) -> Outcome | None:
        """End the request and return the outcome of its transfer, if any. Copied blocks still travel."""
        transfer = self.of_request(request_id)
        if transfer is not None:
            self._end(transfer, "completed" if transfer.saved_tokens >= transfer.num_tokens else "aborted")
        return self.outcomes.pop(request_id, None)

    def take_ends(self) -> tuple[int, ...]:
        """Return the handles of transfers given up since the last call. Workers write nothing more for them."""
        ends, self._ends = tuple(self._ends), []
        return ends

    def _end(self, transfer: OutboundTransfer, outcome: Outcome, *, message: str = "") -> None:
        self._remove(transfer)
        if transfer.opened is None or not transfer.saved_tokens:
            self._post(Cancel(transfer.transfer_id))
        elif transfer.saved_tokens < transfer.num_tokens:
            self._ends.append(transfer.opened.handle)
        self.outcomes[transfer.request_id] = outcome
        self._counts.add_transfer("send", outcome)
        fields = {"transfer_id": transfer.transfer_id, "message": message}
        _log.info("request.sent", request_id=transfer.request_id, outcome=outcome, **fields)

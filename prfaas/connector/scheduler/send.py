"""Requests whose KV leaves this engine: slots asked for early, blocks named for copying as steps make them final.

asked ──SendOpened──▶ open ──last token computed──▶ saved ──request ends──▶ gone
asked ──no answer in time──▶ given up (Cancel)
open ──aborted, failed──▶ given up: the workers say when they write no more; Cancel if they never did
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.engine.protocol import Cancel, Message, Send, SendOpened, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.metadata import Counts, Outcome, Save, SlotSpan
from prfaas.connector.transfer_params import EngineRequest, RequestedTransfer
from prfaas.hashing import HashChain
from prfaas.types import GroupBlocks, TransferId

_log = logs.get("connector.outgoing")


@dataclass(eq=False)
class OutboundTransfer:
    """One sending request. `opened` is the agent's answer, `saved_tokens` what earlier steps have copied."""

    request_id: str
    asked: RequestedTransfer
    groups: tuple[GroupBlocks, ...]
    ask_until: float  # monotonic seconds
    opened: SendOpened | None = None
    saved_tokens: int = 0

    @property
    def transfer_id(self) -> TransferId:
        return self.asked.grant.transfer_id

    @property
    def num_tokens(self) -> int:
        return self.asked.grant.num_tokens

    def __repr__(self) -> str:
        return (
            f"<Outgoing {self.request_id} opened={self.opened is not None} saved={self.saved_tokens}/{self.num_tokens}>"
        )


class OutboundTransfers:
    """All sending requests of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(self, block_map: BlockMap, *, post: Callable[[Message], None], tally: Counts) -> None:
        self._map = block_map
        self._post = post
        self._tally = tally
        self._by_request: dict[str, OutboundTransfer] = {}
        self._by_transfer: dict[TransferId, OutboundTransfer] = {}
        self._ends: list[int] = []
        self._given_up: dict[str, Outcome] = {}  # requests that still run, without their transfer

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._by_transfer

    @property
    def has_work(self) -> bool:
        """Whether the next step has to look after any of them."""
        return bool(self._by_request or self._ends)

    def begin(self, request: EngineRequest, asked: RequestedTransfer, chain: HashChain, *, ask_until: float) -> None:
        """Ask the agent for slots."""
        groups = self._map.transfer_groups(chain, asked.grant.num_tokens)
        outgoing = OutboundTransfer(request.request_id, asked, groups, ask_until)
        self._by_request[request.request_id] = outgoing
        self._by_transfer[outgoing.transfer_id] = outgoing
        self._post(Send(outgoing.transfer_id, asked.token, groups, asked.trace, request.priority))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        """Take the agent's answer, or its word that the transfer is over."""
        outgoing = self._by_transfer.get(message.transfer_id)
        if outgoing is None:
            return
        if isinstance(message, SendOpened):
            outgoing.opened = message
        else:
            self._end(outgoing, message.reason, message=message.message)

    def is_undecided(self, request_id: str, *, now: float) -> bool:
        """Whether the request should wait for its slots; gives the transfer up once the time for that is over."""
        outgoing = self._by_request.get(request_id)
        if outgoing is None or outgoing.opened is not None:
            return False
        if now < outgoing.ask_until:
            return True
        self._end(outgoing, "agent_slow")
        return False

    def save(self, request_id: str, computed_tokens: int, tables: Callable[[], Sequence[Sequence[int]]]) -> Save | None:
        """What the workers copy in a step that ends with `computed_tokens`; `tables()` are the block ids by group."""
        outgoing = self._by_request.get(request_id)
        if outgoing is None or outgoing.saved_tokens >= outgoing.num_tokens:
            return None
        if outgoing.opened is None:  # scheduled without having been asked whether it may be: nothing to copy to
            self._end(outgoing, "agent_slow")
            return None
        opened, done = outgoing.opened, outgoing.saved_tokens
        if computed_tokens <= done:  # the engine had taken its blocks away, and computes anew what is copied
            return None
        spans = self._map.filled(tables(), outgoing.num_tokens, saved_tokens=done, computed_tokens=computed_tokens)
        outgoing.saved_tokens = min(computed_tokens, outgoing.num_tokens)
        last = outgoing.saved_tokens == outgoing.num_tokens
        return Save(opened.handle, last, tuple(SlotSpan.of(span, opened.slots) for span in spans))

    def end(self, request_id: str) -> Outcome | None:
        """The request has ended; what was copied still travels. How its transfer stands, None when it had none."""
        outgoing = self._by_request.get(request_id)
        if outgoing is not None:
            whole = outgoing.saved_tokens >= outgoing.num_tokens
            self._end(outgoing, "completed" if whole else "aborted")
        return self._given_up.pop(request_id, None)

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it."""
        for outgoing in list(self._by_request.values()):
            self._end(outgoing, reason)

    def take_ends(self) -> tuple[int, ...]:
        """Handles of transfers given up since the last step, for which the workers write nothing more."""
        ends, self._ends = tuple(self._ends), []
        return ends

    def _end(self, outgoing: OutboundTransfer, outcome: Outcome, *, message: str = "") -> None:
        del self._by_request[outgoing.request_id]
        del self._by_transfer[outgoing.transfer_id]
        if outgoing.opened is None or not outgoing.saved_tokens:
            self._post(Cancel(outgoing.transfer_id))
        elif outgoing.saved_tokens < outgoing.num_tokens:
            self._ends.append(outgoing.opened.handle)
        self._given_up[outgoing.request_id] = outcome
        self._tally.transfers["send", outcome] += 1
        fields = {"transfer_id": outgoing.transfer_id, "message": message}
        _log.info("request.sent", request_id=outgoing.request_id, outcome=outcome, **fields)

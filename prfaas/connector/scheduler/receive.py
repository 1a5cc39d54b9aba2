"""Requests whose KV comes out of the agent's pool: claimed, parked, loaded when all of it is there.

Claims are of a transfer that another agent sends (`begin`) or of a prefix that the pool holds already (`hold`).

claimed ──ReceiveReady──▶ ready ──blocks allocated──▶ loading ──workers are done──▶ gone (Release)
claimed ──blocks allocated early──▶ allocated ──ReceiveReady──▶ loading
claimed ──TransferFailed, time-out──▶ gone: the engine computes the prompt itself
allocated ──TransferFailed, time-out──▶ gone: the load has failed, the engine computes the prompt itself
any ──the request ends──▶ gone (Release); blocks allocated early are given back as a failed load

A claimed request holds no engine blocks unless `may_preallocate` lets it have them before its data is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.engine.protocol import Hold, Message, Receive, ReceiveReady, Release, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.metadata import Counts, Load, Outcome, SlotSpan, Source
from prfaas.connector.transfer_params import EngineRequest, RequestedTransfer
from prfaas.hashing import NO_HASH, HashChain
from prfaas.types import TransferId

_log = logs.get("connector.incoming")


@dataclass(eq=False)
class InboundTransfer:
    """One receiving request."""

    request_id: str
    transfer_id: TransferId
    num_tokens: int
    source: Source
    late_at: float  # monotonic seconds
    ready: ReceiveReady | None = None
    local_tokens: int = 0  # what the engine's own prefix cache held when the load was offered
    tables: Sequence[Sequence[int]] | None = None  # block ids by group that the engine has given it
    loading: bool = False  # a worker reads, or is about to read, the slots
    abandoned: bool = False  # the request ended while it was loading

    def __repr__(self) -> str:
        return f"<Incoming {self.request_id} ready={self.ready is not None} loading={self.loading}>"


class InboundTransfers:
    """All receiving requests of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(
        self,
        block_map: BlockMap,
        *,
        receive_timeout_seconds: float,
        hold_wait_seconds: float,
        may_preallocate: Callable[[], bool],
        post: Callable[[Message], None],
        tally: Counts,
    ) -> None:
        """`may_preallocate` says whether a request may have engine blocks before its data is there."""
        self._map = block_map
        self._receive_timeout_seconds = receive_timeout_seconds
        self._hold_wait_seconds = hold_wait_seconds
        self._may_preallocate = may_preallocate
        self._post = post
        self._tally = tally
        self._by_request: dict[str, InboundTransfer] = {}
        self._by_transfer: dict[TransferId, InboundTransfer] = {}
        self._loads: list[Load] = []
        self._failed_loads: list[str] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._by_transfer

    @property
    def has_work(self) -> bool:
        """Whether the next step has to look after any of them."""
        return bool(self._by_request or self._loads or self._failed_loads)

    def begin(self, request: EngineRequest, asked: RequestedTransfer, chain: HashChain, *, now: float) -> None:
        """Claim the transfer; the agent compares the hash of our prompt with the granted one."""
        grant = asked.grant
        late_at = now + self._receive_timeout_seconds
        self._add(InboundTransfer(request.request_id, grant.transfer_id, grant.num_tokens, "receive", late_at))
        groups = self._map.transfer_groups(chain, grant.num_tokens)
        self._post(Receive(grant.transfer_id, asked.token, chain.at(grant.num_tokens), groups, asked.trace))

    def decline(self, asked: RequestedTransfer) -> None:
        """Have the agent give up a transfer that a request names and cannot have: nobody else of this engine takes it."""
        self._post(Receive(asked.grant.transfer_id, asked.token, NO_HASH, (), asked.trace))

    def hold(self, request_id: str, transfer_id: TransferId, chain: HashChain, *, num_tokens: int, now: float) -> None:
        """Pin the prefix of `num_tokens` tokens that this node's pool was found to hold."""
        self._add(InboundTransfer(request_id, transfer_id, num_tokens, "reuse", now + self._hold_wait_seconds))
        self._post(Hold(transfer_id, num_tokens, self._map.transfer_groups(chain, num_tokens)))

    def _add(self, incoming: InboundTransfer) -> None:
        self._by_request[incoming.request_id] = incoming
        self._by_transfer[incoming.transfer_id] = incoming

    def on_message(self, message: ReceiveReady | TransferFailed) -> None:
        """Take the agent's word that everything is there, or that nothing will come."""
        incoming = self._by_transfer.get(message.transfer_id)
        if incoming is None:
            return
        if isinstance(message, ReceiveReady):
            incoming.ready = message
            if incoming.tables is not None:
                self._load(incoming, message)
        elif not incoming.loading:
            self._end(incoming, message.reason, message=message.message)

    def num_offered_tokens(self, request_id: str) -> int | None:
        """The length of the request's claim, None where it has none, or none that can still be loaded."""
        incoming = self._by_request.get(request_id)
        return None if incoming is None or incoming.loading else incoming.num_tokens

    def num_tokens(self, request_id: str, local_tokens: int, *, now: float) -> int | None:
        """How many tokens beyond `local_tokens` can be loaded; None while that is not known."""
        incoming = self._by_request.get(request_id)
        if incoming is None:
            return 0
        if incoming.loading:  # asked again: the load failed, or the engine took the blocks away
            return 0
        if local_tokens >= incoming.num_tokens:
            self._give_back(incoming, "held")
            return 0
        if incoming.ready is None and now > incoming.late_at:
            self._give_back(incoming, "timeout")
            return 0
        if incoming.ready is None and not self._may_have_blocks(incoming):
            return None
        incoming.local_tokens = local_tokens
        return incoming.num_tokens - local_tokens

    def waits(self, request_id: str, *, now: float) -> bool:
        """Whether the request is claimed, its data is not there, and it may neither have blocks before nor give it up."""
        its = self._by_request.get(request_id)
        if its is None or its.loading or its.ready is not None or now > its.late_at:
            return False
        return not self._may_have_blocks(its)

    def _may_have_blocks(self, its: InboundTransfer) -> bool:
        """Whether blocks may be there before the data. What this node's pool was found to hold comes in a moment or not at
        all, and an engine may fail a request whose early blocks stay empty."""
        return its.source == "receive" and self._may_preallocate()

    def expire(self, now: float) -> None:
        """Give up what has blocks and is late; what has none is asked for, and given up in `num_tokens`."""
        for incoming in list(self._by_request.values()):
            if incoming.tables is not None and not incoming.loading and now > incoming.late_at:
                self._give_back(incoming, "timeout")

    @property
    def num_awaited(self) -> int:
        """Requests that have blocks and no data yet: nobody asks for them any more."""
        return sum(its.tables is not None and not its.loading for its in self._by_request.values())

    def allocated(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """The engine has blocks for what was offered; `tables[group]` are their ids. The next step loads what is there.

        The load has failed when the offer has lapsed meanwhile, as it does with the agent.
        """
        incoming = self._by_request.get(request_id)
        if incoming is None:
            self._failed_loads.append(request_id)
            return
        assert incoming.tables is None, f"{incoming} has blocks already"
        incoming.tables = [list(table) for table in tables]
        if incoming.ready is not None:
            self._load(incoming, incoming.ready)

    def declined(self, request_id: str) -> None:
        """The engine runs the request on what its own cache holds: of what was offered it loads nothing."""
        incoming = self._by_request.get(request_id)
        if incoming is not None and incoming.tables is None:
            self._give_back(incoming, "held")

    def _load(self, incoming: InboundTransfer, ready: ReceiveReady) -> None:
        assert incoming.tables is not None
        incoming.loading = True
        spans = self._map.missing(incoming.tables, incoming.num_tokens, local_tokens=incoming.local_tokens)
        slots = tuple(SlotSpan.of(span, ready.slots, ready.generations) for span in spans)
        self._loads.append(Load(incoming.request_id, slots))

    def take_loads(self) -> tuple[Load, ...]:
        """The loads that this step begins."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def take_failed_loads(self) -> tuple[str, ...]:
        """Requests whose blocks were allocated early and will not be filled."""
        failed, self._failed_loads = tuple(self._failed_loads), []
        return failed

    def loaded(self, request_id: str, *, failed: bool) -> None:
        """Every worker has finished reading the slots."""
        incoming = self._by_request.get(request_id)
        if incoming is not None and incoming.loading:
            outcome: Outcome = "aborted" if incoming.abandoned else "overwritten" if failed else "completed"
            self._give_back(incoming, outcome)

    def end(self, request_id: str) -> None:
        """The request has ended. Slots that a worker may be reading are given back when it is done."""
        incoming = self._by_request.get(request_id)
        if incoming is None:
            return
        if incoming.loading:
            incoming.abandoned = True
        else:
            self._give_back(incoming, "aborted")

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it. A load under way ends by itself: its slots stay mapped."""
        for incoming in list(self._by_request.values()):
            if not incoming.loading:
                self._give_back(incoming, reason)

    def _give_back(self, incoming: InboundTransfer, outcome: Outcome) -> None:
        self._post(Release(incoming.transfer_id))
        self._end(incoming, outcome)

    def _end(self, incoming: InboundTransfer, outcome: Outcome, *, message: str = "") -> None:
        del self._by_request[incoming.request_id]
        del self._by_transfer[incoming.transfer_id]
        if incoming.tables is not None and not incoming.loading:
            self._failed_loads.append(incoming.request_id)
        self._tally.transfers[incoming.source, outcome] += 1
        fields = {"transfer_id": incoming.transfer_id, "num_tokens": incoming.num_tokens, "message": message}
        _log.info("request.received", request_id=incoming.request_id, source=incoming.source, outcome=outcome, **fields)

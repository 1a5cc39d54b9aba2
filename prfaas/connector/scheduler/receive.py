"""Inbound transfers of the scheduler side: claimed at the agent, parked, and loaded once all of the KV is there.

A claim is for a transfer from another agent (`begin`) or for a prefix in this node's pool (`hold`).

claimed ──ReceiveReady──▶ ready ──blocks allocated──▶ loading ──workers have copied──▶ gone (Release)
claimed, ready ──TransferFailed, silent agent, recompute──▶ gone: the engine computes the prompt
any ──the request ends──▶ gone (Release), from loading after the load

The engine recomputes a prompt when its KV would arrive later than a local prefill ends (see `prfaas.scheduler.hedge`).
vLLM cannot compute a request and load it at the same time, so the transfer is cancelled then.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas import logs
from prfaas.agent.engine.protocol import Hold, Message, Receive, ReceiveReady, Release, TransferFailed
from prfaas.connector.block_map import BlockMap
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Load, LoadSource, Outcome, SlotSpan
from prfaas.connector.scheduler.prefill_rate import PrefillRate
from prfaas.connector.scheduler.transfer_table import RequestTransfer, TransferTable
from prfaas.connector.transfer_params import EngineRequest, RequestedTransfer
from prfaas.hashing import NO_HASH, HashChain
from prfaas.scheduler.hedge import InboundProgress, RecomputeQueue, decide
from prfaas.transfer_report import ReceivedReport
from prfaas.types import TransferId

MAX_UNCLAIMED = 1024  # Transfers to give up at the next agent.
_log = logs.get("connector.inbound")


@dataclass(eq=False)
class InboundTransfer(RequestTransfer):
    """Transfer of a decode leg, or a prefix from this node's pool.

    Attributes:
        claimed_at: Monotonic seconds.
        claim: Message that gives the transfer up at an agent that does not know it; None for this node's pool.
        local_tokens: Tokens in the engine's own prefix cache when the load was offered.
        is_loading: A worker reads the slots, or is about to.
        is_abandoned: The request ended while it was loading.
    """

    num_tokens: int
    source: LoadSource
    claimed_at: float
    claim: Receive | None = None
    ready: ReceiveReady | None = None
    local_tokens: int = 0
    is_loading: bool = False
    is_abandoned: bool = False


class InboundTransfers(TransferTable[InboundTransfer]):
    """All inbound transfers of one engine."""

    def __init__(
        self,
        block_map: BlockMap,
        *,
        silence_seconds: float,
        prefill_rate: PrefillRate,
        post: Callable[[Message], None],
        counts: Counts,
    ) -> None:
        super().__init__(post=post, counts=counts)
        self._map = block_map
        self._silence_seconds = silence_seconds
        self._prefill_rate = prefill_rate
        self._recomputes = RecomputeQueue()
        self._loads: list[Load] = []
        self._failed_loads: list[str] = []
        self._unclaimed: deque[Receive] = deque(maxlen=MAX_UNCLAIMED)
        self.reports: dict[str, ReceivedReport] = {}  # Refused and ended transfers of requests that have not ended.

    @property
    def has_work(self) -> bool:
        """True if the next step must handle a transfer or a load."""
        return bool(self._by_request or self._loads or self._failed_loads)

    @property
    def is_waiting(self) -> bool:
        """True if the KV of any request is pending."""
        return any(not transfer.is_loading for transfer in self._by_request.values())

    def begin(self, request: EngineRequest, transfer: RequestedTransfer, chain: HashChain, *, now: float) -> None:
        """Claim a granted transfer. The agent compares the hash of the prompt with the granted hash."""
        grant, decline = transfer.grant, _decline(transfer)
        self._add(InboundTransfer(request.request_id, grant.transfer_id, grant.num_tokens, "receive", now, decline))
        groups = self._map.transfer_groups(chain, grant.num_tokens)
        self._post(Receive(grant.transfer_id, transfer.token, chain.at(grant.num_tokens), groups, transfer.trace))

    def decline(self, transfer: RequestedTransfer) -> None:
        """Tell the agent to give up a transfer that no request of this engine can take."""
        self._post(_decline(transfer))

    def hold(self, request_id: str, transfer_id: TransferId, chain: HashChain, *, num_tokens: int, now: float) -> None:
        """Claim a prefix of `num_tokens` tokens that this node's pool holds."""
        self._add(InboundTransfer(request_id, transfer_id, num_tokens, "reuse", now))
        self._post(Hold(transfer_id, num_tokens, self._map.transfer_groups(chain, num_tokens)))

    def on_message(self, message: ReceiveReady | TransferFailed) -> None:
        """Handle the arrival of all KV, or the failure of a transfer."""
        transfer = self.of_transfer(message.transfer_id)
        if transfer is None:
            return
        if isinstance(message, ReceiveReady):
            transfer.ready = message
        elif not transfer.is_loading:
            self._end(transfer, message.reason, message=message.message)

    def offered_tokens(self, request_id: str) -> int | None:
        """Return the length of the request's claim, or None if there is nothing to load."""
        transfer = self.of_request(request_id)
        return None if transfer is None or transfer.is_loading else transfer.num_tokens

    def num_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """Return how many tokens beyond `local_tokens` can be loaded, or None while that is unknown."""
        transfer = self.of_request(request_id)
        if transfer is None or transfer.is_loading:
            # The engine asks for a loading request again if the load failed, or if it took the blocks away.
            return 0
        if local_tokens >= transfer.num_tokens:
            self._release(transfer, "held")
            return 0
        if transfer.ready is None:
            return None
        transfer.local_tokens = local_tokens
        return transfer.num_tokens - local_tokens

    def waits(self, request_id: str) -> bool:
        """Return whether the request stays parked, since its KV may still come."""
        transfer = self.of_request(request_id)
        return transfer is not None and transfer.ready is None

    def on_progress(self, claims: Sequence[Sequence[Any]], *, now: float) -> None:
        """Recompute the prompts whose KV would come too late. `claims` is as in `Alive`."""
        by_id = {TransferId(claim[0]): claim[1:] for claim in claims}
        for transfer in self:
            if transfer.source == "receive" and transfer.ready is None:
                self._hedge(transfer, by_id.get(transfer.transfer_id), now=now)

    def _hedge(self, transfer: InboundTransfer, claim: Sequence[Any] | None, *, now: float) -> None:
        waited = now - transfer.claimed_at
        unopened = InboundProgress(waited, paused_seconds=waited, is_open=False)
        progress = unopened if claim is None else InboundProgress(waited, *claim)
        prefill_seconds = self._prefill_rate.seconds(transfer.num_tokens)
        local = self._recomputes.local_seconds(prefill_seconds, now=now)
        decision = decide(progress, local_seconds=local, min_wait_seconds=self._silence_seconds)
        if decision.action == "recompute":
            self._recomputes.add(prefill_seconds, now=now)
            self._release(transfer, "recomputed", message=f"{decision.reason}: {decision.remaining_seconds:.2f} s left")

    def on_allocated(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """Load into the blocks for an offer. The load fails if the offer has lapsed, for example with its agent."""
        transfer = self.of_request(request_id)
        if transfer is None:
            self._failed_loads.append(request_id)
            return
        transfer.is_loading = True
        ready = transfer.ready
        assert ready is not None, f"{transfer} was not offered"
        num_tokens, local_tokens = transfer.num_tokens, transfer.local_tokens
        spans = self._map.filled(tables, num_tokens, saved_tokens=local_tokens, computed_tokens=num_tokens)
        slots = tuple(SlotSpan.of(span, ready.slots, ready.generations) for span in spans)
        self._loads.append(Load(request_id, slots))

    def on_declined(self, request_id: str) -> None:
        """Release an offer that the engine does not use: its own cache suffices."""
        transfer = self.of_request(request_id)
        if transfer is not None and not transfer.is_loading:
            self._release(transfer, "held")

    def take_loads(self) -> tuple[tuple[Load, ...], tuple[str, ...]]:
        """Return the loads of the next step, and the requests whose blocks stay empty."""
        loads, failed = tuple(self._loads), tuple(self._failed_loads)
        self._loads, self._failed_loads = [], []
        return loads, failed

    def on_loaded(self, request_id: str, *, has_failed: bool) -> None:
        """End a transfer after every worker has read its slots."""
        transfer = self.of_request(request_id)
        if transfer is not None and transfer.is_loading:
            outcome: Outcome = "aborted" if transfer.is_abandoned else "completed"
            self._release(transfer, "overwritten" if has_failed else outcome)

    def end(self, request_id: str) -> ReceivedReport | None:
        """End the request, and return the outcome of its transfer from another agent.

        Slots that a worker may be reading are released after the load.
        """
        transfer = self.of_request(request_id)
        if transfer is not None and transfer.is_loading:
            transfer.is_abandoned = True
        elif transfer is not None:
            self._release(transfer, "aborted")
        return self.reports.pop(request_id, None)

    def fail_all(self, reason: Outcome) -> None:
        """Give up all transfers. Planned loads fail; a running load ends by itself, since its slots stay mapped."""
        self._failed_loads += [load.request_id for load in self._loads]
        self._loads = []
        for transfer in self:
            if not transfer.is_loading:
                if reason == "agent_lost" and transfer.claim is not None:
                    self._unclaimed.append(transfer.claim)
                self._release(transfer, reason)

    def decline_unclaimed(self) -> None:
        """Have a new agent give up the transfers that were claimed at the lost one, whose senders open them again."""
        for decline in self._unclaimed:
            self._post(decline)
        self._unclaimed.clear()

    def _release(self, transfer: InboundTransfer, outcome: Outcome, *, message: str = "") -> None:
        self._post(Release(transfer.transfer_id))
        self._end(transfer, outcome, message=message)

    def _end(self, transfer: InboundTransfer, outcome: Outcome, *, message: str = "") -> None:
        self._remove(transfer)
        self._counts.add_transfer(transfer.source, outcome)
        if transfer.source == "receive" and not transfer.is_abandoned:
            num_tokens = transfer.num_tokens if outcome == "completed" else 0
            report = ReceivedReport(transfer.transfer_id.hex(), outcome, num_tokens)
            self.reports[transfer.request_id] = report
        fields = {"transfer_id": transfer.transfer_id, "num_tokens": transfer.num_tokens, "message": message}
        _log.info("request.received", request_id=transfer.request_id, source=transfer.source, outcome=outcome, **fields)


def _decline(transfer: RequestedTransfer) -> Receive:
    """Return the message that gives a transfer up."""
    return Receive(transfer.grant.transfer_id, transfer.token, NO_HASH, (), transfer.trace)

"""Transfers that arrive: from another agent's open to slots that an engine may load.

The two sides of a transfer may come in any order: the other agent's `open` (the data) and the local engine's `Receive`
(the claim). Either creates the entry; it becomes ready when both are there and every byte is in host memory. Only then are
its prefix blocks there for other requests: the claim's hashes are the engine's own. A copy's are those of its grant.

    claimed ──open──▶ arriving ──all bytes──▶ ready ──Release──▶ gone
    arriving ──claim──▶ (still arriving, now with a reader)
    arriving, a copy ──all bytes──▶ gone: its prefix blocks stay, nobody claims it
    any ──cancel, failure, deadline──▶ ended, remembered until the grant expires: a late open or claim hears why
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prfaas import grants, logs, metrics, tracing
from prfaas.agent.engine.protocol import Receive, ReceiveReady, TransferFailed
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.transfer.grant_check import Refusal, reason_of
from prfaas.agent.transfer.inbound import InboundTransfer, Offer, OutcomeCache, offer_of
from prfaas.agent.transfer.layouts import LayoutRegistry, answer_layout_probe
from prfaas.agent.transfer.link_probe import InboundProbes
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import grant_of, is_link_probe
from prfaas.agent.transfer.repack import Background, repacking_into
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError, LayoutError, PrfaasError, RemoteProtocolError
from prfaas.grants import Grant, GrantKind
from prfaas.kv.repack import Side
from prfaas.transport.protocol.messages import MAX_MESSAGE_CHARACTERS, Ending
from prfaas.transport.receiver.api import (
    Accepted,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejected,
)
from prfaas.transport.receiver.server import Receiver
from prfaas.types import AgentName, FailureReason, TransferId

_log = logs.get("agent.receiving")
Reply = Callable[[Accepted | Rejected], None]


class InboundTransfers:
    """Every transfer that arrives at this node. Runs on the agent's loop; receiver events are handed over to it."""

    def __init__(
        self,
        *,
        name: AgentName,
        grant_key: bytes,
        pool: Pool,
        layouts: LayoutRegistry,
        transfer_log: TransferLog,
        open_timeout_seconds: float,
        in_background: Background,
        probes: InboundProbes,
    ) -> None:
        self._name = name
        self._grant_key = grant_key
        self._pool = pool
        self._layouts = layouts
        self._log = transfer_log
        self._open_timeout_seconds = open_timeout_seconds
        self._in_background = in_background
        self._probes = probes
        self._inbound: dict[TransferId, InboundTransfer] = {}
        self._leaving: dict[TransferId, Placement] = {}  # failed, but the transport may still write to them
        self._endings = OutcomeCache()
        self.receiver: Receiver | None = None  # set before the first open can come

    def __len__(self) -> int:
        return len(self._inbound) + len(self._leaving)

    # What the other agent says

    def on_open(self, request: OpenRequest, reply: Reply) -> None:
        """Grant memory for a transfer, or say why not."""
        try:
            reply(self._answer(request))
        except (Refusal, GrantError, RemoteProtocolError, LayoutError) as error:
            reason, message = _said(error)
            if isinstance(error, GrantError):
                metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
            metrics.TRANSFERS.labels(direction="in", outcome=reason).inc()
            _log.warning("transfer.refused", transfer_id=request.transfer_id.hex(), reason=reason, message=message)
            reply(Rejected(reason, message))
        except Exception:  # ours, which must not leave the transport waiting for a decision for ever
            metrics.TRANSFERS.labels(direction="in", outcome="protocol").inc()
            _log.exception("transfer.open_failed", transfer_id=request.transfer_id.hex())
            reply(Rejected("protocol", "this agent cannot read the open"))

    def _answer(self, request: OpenRequest) -> Accepted | Rejected:
        if is_link_probe(request.open_body):
            return self._probes.accept(request)
        return self._accept(request) if request.object_bytes else answer_layout_probe(request, self._layouts)

    def _accept(self, request: OpenRequest) -> Accepted:
        token, use = grant_of(request.open_body)
        grant = self._check(token, TransferId(request.transfer_id), use)
        if grant.source != request.peer_name:
            raise GrantError("not_theirs", f"the grant lets {grant.source} send, not {request.peer_name}")
        ended = self._endings.of(grant)
        if ended is not None:
            raise Refusal(ended.reason, ended.message)
        try:
            return self._accept_granted(request, grant)
        except (Refusal, GrantError, RemoteProtocolError, LayoutError) as error:
            self._refuse(grant, *_said(error))  # whoever waits for it, or will, waits in vain
            raise

    def _accept_granted(self, request: OpenRequest, grant: Grant) -> Accepted:
        offer = offer_of(request, grant, self._layouts)
        inbound = self._inbound.get(grant.transfer_id) or self._create(grant)
        if not inbound.expects(offer.side):
            raise Refusal("prompt_mismatch", "the blocks are not those of the engine that waits for them")
        if inbound.placement is None:
            self._begin(inbound, offer)
        assert inbound.placement is not None
        if inbound.complete:
            return Accepted(held=range(len(offer.plan.object_bytes)), destination=inbound.placement.memory)
        held = _held(inbound, inbound.placement)
        inbound.is_partial |= held != inbound.placement.held
        return Accepted(held=held, destination=inbound.placement.memory)

    def _refuse(self, grant: Grant, reason: FailureReason, message: str) -> None:
        """Of a good grant nothing comes: an OPEN that comes again is answered without being read."""
        if grant.transfer_id in self._inbound:
            self._fail(grant.transfer_id, reason, message)
        else:
            until = time.monotonic() + grant.expires_at - time.time()
            self._endings.put(grant.transfer_id, Ending(reason, message), until=until)

    def _check(self, token: bytes, transfer_id: TransferId, kind: GrantKind) -> Grant:
        now = time.time()
        return grants.verify_end(
            token, self._grant_key, kind=kind, end="destination", agent=self._name, transfer_id=transfer_id, now=now
        )

    def _create(self, grant: Grant) -> InboundTransfer:
        now = time.monotonic()
        inbound = InboundTransfer(grant, now + grant.expires_at - time.time(), now + self._open_timeout_seconds)
        self._inbound[grant.transfer_id] = inbound
        return inbound

    def _begin(self, inbound: InboundTransfer, offer: Offer) -> None:
        transfer_id, plan = inbound.grant.transfer_id, offer.plan
        placement = place(self._pool, plan, offer.arenas, owner=f"transfer-{transfer_id.hex()}")
        if placement is None:
            raise Refusal("no_memory", f"no room for {len(plan.object_bytes)} transfer blocks")
        inbound.placement = placement
        self._cut_anew(inbound)
        inbound.memory_free = False
        held_bytes = sum(plan.object_bytes[index] for index in _held(inbound, placement))
        inbound.record = self._log.begin(offer.record(transfer_id, held_bytes=held_bytes))

    # What the receiver says

    def on_event(self, event: ReceiveEvent) -> None:
        transfer_id = TransferId(event.transfer_id)
        if transfer_id in self._probes and transfer_id not in self._inbound:
            if isinstance(event, ReceiveMemoryFree):
                self._probes.ended(transfer_id)
            return
        if isinstance(event, ReceiveMemoryFree):
            self._memory_free(transfer_id)
            return
        inbound = self._inbound.get(transfer_id)
        if isinstance(event, ReceiveFailed):
            self._failed(transfer_id, inbound, event)
        elif inbound is not None:
            self._complete(inbound, event)

    def _failed(self, transfer_id: TransferId, inbound: InboundTransfer | None, event: ReceiveFailed) -> None:
        if inbound is None:  # a cancel that overtook its open
            self._endings.cancelled(event.peer_name, transfer_id, Ending(event.reason, event.message))
        elif inbound.grant.source == event.peer_name:
            inbound.received(event.stats)
            self._fail(transfer_id, event.reason, event.message)

    def _complete(self, inbound: InboundTransfer, event: ReceiveCompleted) -> None:
        assert inbound.placement is not None and inbound.record is not None
        inbound.complete = True
        inbound.received(event.stats)
        self._publish(inbound)
        self._log.end(inbound.record, "completed")
        self._tell_reader(inbound)

    def _publish(self, inbound: InboundTransfer) -> None:
        """What has come whole may be reused by later requests, as soon as its hashes are not its sender's word alone."""
        placement = inbound.placement
        if placement is None or not inbound.complete or inbound.is_partial or not inbound.is_vouched_for:
            return
        if not self._layouts.are_foreign(placement.plan.layouts):
            placement.publish(range(len(placement.slots)))

    def _cut_anew(self, inbound: InboundTransfer) -> None:
        """Where the reader's layout is another than what arrives, give it blocks of its own.

        Raises:
            Refusal: they do not map, or there is no room.
        """
        if inbound.claimed is None or inbound.placement is None:
            return
        if inbound.placement.plan.layouts != inbound.claimed.layouts:
            owner = f"repack-{inbound.grant.transfer_id.hex()}"
            inbound.repacking = repacking_into(inbound.claimed, inbound.arenas, inbound.placement, owner=owner)

    def _repacked(self, inbound: InboundTransfer, worked: bool) -> None:
        if worked:
            self._tell_reader(inbound)
        else:
            self._refuse_claim(inbound, "protocol", "blocks could not be cut anew")

    def _tell_reader(self, inbound: InboundTransfer) -> None:
        placement = inbound.delivered
        if not inbound.complete or inbound.reader is None or inbound.reading or placement is None:
            return
        if inbound.repacking is not None and not inbound.repacking.is_done:
            inbound.repacking.begin(self._in_background, lambda worked: self._repacked(inbound, worked))
            return
        inbound.reading = True
        inbound.delivery.event("ready")
        slots, generations = (
            placement.plan.nested(list(placement.slots)),
            placement.plan.nested(placement.generations()),
        )
        inbound.reader.post(ReceiveReady(inbound.grant.transfer_id, slots, generations))

    def _memory_free(self, transfer_id: TransferId) -> None:
        placement = self._leaving.pop(transfer_id, None)
        if placement is not None:
            placement.release()
        elif transfer_id in self._inbound:
            self._inbound[transfer_id].memory_free = True
            self._end_copy(self._inbound[transfer_id])

    def _end_copy(self, inbound: InboundTransfer) -> None:
        """A whole copy ends once its sender cannot ask for it again."""
        if inbound.is_copy and inbound.complete:
            self._end(inbound)

    # What the engine says

    def claim(self, engine: EngineConnection, arenas: tuple[Arena, ...], request: Receive) -> None:
        """The engine, whose ranks have these arenas, wants this transfer; it hears ReceiveReady or TransferFailed."""
        try:
            grant = self._check(request.grant, request.transfer_id, "transfer")
            self._check_unclaimed(request.transfer_id)
        except GrantError as error:
            metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
            engine.post(TransferFailed(request.transfer_id, "grant_refused", str(error)))
            return
        ended = self._endings.of(grant)
        if ended is not None:
            engine.post(TransferFailed(request.transfer_id, ended.reason, ended.message))
            return
        inbound = self._inbound.get(request.transfer_id) or self._create(grant)
        inbound.reader, inbound.arenas = engine, arenas
        inbound.delivery = tracing.continued("agent.deliver", request.trace, transfer_id=request.transfer_id.hex())
        try:
            self._take_claim(inbound, request)
        except Refusal as refusal:
            self._refuse_claim(inbound, refusal.reason, str(refusal))
            return
        self._publish(inbound)
        self._tell_reader(inbound)

    def _check_unclaimed(self, transfer_id: TransferId) -> None:
        inbound = self._inbound.get(transfer_id)
        if inbound is not None and inbound.reader is not None:
            raise GrantError("used", f"{inbound.reader.attach.instance} has claimed this transfer already")

    def _take_claim(self, inbound: InboundTransfer, request: Receive) -> None:
        """Know what the reader expects, and have it cut so.

        Raises:
            Refusal: it expects another prompt's blocks or none, or it cannot be given its own.
        """
        if not request.groups:
            raise Refusal("cancelled", "the receiving engine will not load it")
        its = Side(tuple(arena.layout for arena in inbound.arenas), request.groups)
        if request.prompt_hash != inbound.grant.prompt_hash or not inbound.expects(its):
            raise Refusal("prompt_mismatch", "the engine's prompt is not the one that was granted")
        inbound.claimed = its
        self._cut_anew(inbound)

    def _refuse_claim(self, inbound: InboundTransfer, reason: FailureReason, message: str) -> None:
        if inbound.complete and inbound.reader is not None:  # which is no failure of the transfer
            inbound.reader.post(TransferFailed(inbound.grant.transfer_id, reason, message))
            self._end(inbound, reason, message)
        else:
            self._fail(inbound.grant.transfer_id, reason, message)

    def forget(self, model: str) -> None:
        """What has come or is coming of a model, and that no engine reads yet, is given up: it was computed before."""
        placed = (
            (its, its.placement.plan.layouts[0].model) for its in self._inbound.values() if its.placement is not None
        )
        for inbound in [its for its, its_model in placed if its_model == model and not its.reading]:
            message = "what was held of this model is forgotten"
            if inbound.complete and inbound.reader is None:
                self._end(inbound, "cancelled", message)
            else:
                self._refuse_claim(inbound, "cancelled", message)

    def release(self, transfer_id: TransferId, instance: str) -> None:
        """The engine reads these slots no more, or never will; only who claimed a transfer releases it."""
        inbound = self._inbound.get(transfer_id)
        if inbound is None or inbound.reader is None or inbound.reader.attach.instance != instance:
            return
        if inbound.reading and inbound.record is not None:
            self._log.loaded(inbound.record)
        self._unclaim(inbound)

    def _unclaim(self, inbound: InboundTransfer) -> None:
        inbound.reader = None
        if inbound.complete:
            self._end(inbound)
        else:
            self._fail(inbound.grant.transfer_id, "cancelled", "the receiving engine gave up")

    def engine_lost(self, engine: EngineConnection) -> None:
        """A process of an engine is gone, and with it what it claimed. A worker that still reads these slots finds them given
        to others by their generations."""
        for inbound in list(self._inbound.values()):
            if inbound.reader is engine:
                self._unclaim(inbound)

    def expire(self, now: float) -> None:
        """Fail what is late, forget what has long ended; `now` is monotonic seconds."""
        self._layouts.expire(now)
        for inbound in list(self._inbound.values()):
            if now >= inbound.deadline and not inbound.reading:
                if inbound.complete and inbound.reader is None:
                    self._end(inbound)
                elif not inbound.complete:  # else it is being cut, which ends by itself
                    self._fail(inbound.grant.transfer_id, "deadline", "it did not arrive before its grant expired")
            elif now >= inbound.open_until and inbound.placement is None:
                self._fail(inbound.grant.transfer_id, "unreachable", f"{inbound.grant.source} has not opened it")
        self._endings.expire(now)

    def _fail(self, transfer_id: TransferId, reason: FailureReason, message: str) -> None:
        inbound = self._inbound.get(transfer_id)
        if inbound is None or inbound.complete:
            return
        if inbound.reader is not None:
            inbound.reader.post(TransferFailed(transfer_id, reason, message))
        if inbound.record is not None:
            self._log.end(inbound.record, reason, message=message)
        if inbound.placement is not None and not inbound.memory_free and self.receiver is not None:
            self.receiver.cancel(transfer_id, reason, message)
        self._end(inbound, reason, message)

    def _end(self, inbound: InboundTransfer, failure: FailureReason | None = None, message: str = "") -> None:
        transfer_id = inbound.grant.transfer_id
        inbound.delivery.end(f"{failure}: {message}" if failure else "")
        del self._inbound[transfer_id]
        ending = Ending(failure or "cancelled", message or "this transfer has ended here")
        self._endings.put(transfer_id, ending, until=inbound.deadline)
        if inbound.repacking is not None:
            inbound.repacking.end()
        if inbound.placement is None:
            return
        if inbound.memory_free:
            inbound.placement.release()
        else:
            self._pool.quarantine(inbound.placement.lease)
            self._leaving[transfer_id] = inbound.placement


def _held(inbound: InboundTransfer, placement: Placement) -> frozenset[int]:
    """Objects that need not come."""
    return placement.held if inbound.repacking is None else placement.held | inbound.repacking.needless()


def _said(error: PrfaasError | Refusal) -> tuple[FailureReason, str]:
    """The reason, and the words as far as they are no peer's of any length."""
    return reason_of(error), str(error)[:MAX_MESSAGE_CHARACTERS]

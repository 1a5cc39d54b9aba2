"""Inbound transfers: from another agent's OPEN to slots that an engine may read.

A transfer begins with either side, in any order: the peer's OPEN (the data) or the local engine's Receive (the claim).
It is ready when both have come and every byte is in host memory. Its prefix blocks are published only then, because
the claim's hashes are the engine's own. The hashes of a copy are those of its grant.

    claimed ──OPEN──▶ arriving ──all bytes──▶ ready ──Release──▶ ended
    arriving ──claim──▶ arriving, with a reader
    arriving, a copy ──all bytes──▶ ended: its prefix blocks stay, no engine claims it
    any ──cancel, failure, deadline──▶ ended

The latest outcomes are remembered, so that a late OPEN or claim gets the reason.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prfaas import logs, metrics, tracing
from prfaas.agent.engine.protocol import Receive, TransferFailed
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.transfer.grant_check import GrantCheck, TransferRefused, refusal_reason, seconds_left
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.agent.transfer.open_body import OpenBody, read_grant
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import TransferPlan, make_plan
from prfaas.agent.transfer.repack import Background, RepackJob, have_same_prompt, side_of, start_repack
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError, LayoutError, PrfaasError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import prefix_hash
from prfaas.kv.layout import Layout, is_well_formed, prefix_groups
from prfaas.kv.repack import Side
from prfaas.transport.protocol.messages import MAX_MESSAGE_CHARACTERS, EndReason, TransferStats
from prfaas.transport.receiver.admission import EndedTransfers
from prfaas.transport.receiver.api import (
    Acceptance,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejection,
)
from prfaas.transport.receiver.server import Receiver
from prfaas.transport.receiver.transfers import shorten
from prfaas.types import FailureReason, GroupBlocks, Prefix, TransferId

# An engine claims a transfer when it takes the request, usually long before the last byte. A complete transfer without a
# claim is left over from before a restart, or its decode request never came.
CLAIM_TIMEOUT_SECONDS = 5.0
# Ended transfers, and transfers that were cancelled before their OPEN or claim came; about 400 bytes each.
MAX_OUTCOMES = 1 << 12
_log = logs.get("agent.receive")
Reply = Callable[[Acceptance | Rejection], None]


@dataclass(eq=False)
class InboundTransfer:
    """One transfer at its receiver."""

    grant: Grant
    # Monotonic seconds.
    deadline: float
    # Monotonic seconds. A sender that has not sent its OPEN by then never will.
    open_deadline: float
    # Engine that claimed the transfer, with the blocks it expects and its ranks' arenas.
    reader: EngineConnection | None = None
    claimed: Side | None = None
    arenas: tuple[Arena, ...] = ()
    # Monotonic seconds of the OPEN.
    opened_at: float = 0.0
    # Slots for the blocks that arrive.
    placement: Placement | None = None
    # Copy into the reader's layout, if that differs.
    repack: RepackJob | None = None
    record: TransferRecord | None = None
    # The sender was told to omit blocks that the reader holds in its own layout.
    is_partial: bool = False
    is_complete: bool = False
    # Monotonic seconds; infinite until all bytes are here.
    completed_at: float = math.inf
    # The engine was given the slots and has not released them.
    is_being_read: bool = False
    # The transport no longer writes to the slots.
    is_memory_free: bool = True
    # From the claim until the engine has read the slots.
    delivery: tracing.Span = tracing.NO_SPAN

    @property
    def is_copy(self) -> bool:
        """True for a prefix copy: it has no reader and ends with its last byte."""
        return self.grant.kind == "copy"

    @property
    def is_verified(self) -> bool:
        """True when the reader or a copy's grant confirms the sender's hashes."""
        if self.is_copy:
            return True
        if self.placement is None or self.claimed is None:
            return False
        return self.claimed.groups == self.placement.plan.groups

    @property
    def delivered(self) -> Placement | None:
        """Slots that the reader gets."""
        return self.repack.target if self.repack is not None else self.placement

    @property
    def held(self) -> frozenset[int]:
        """Objects that the sender need not send."""
        if self.placement is None:
            return frozenset()
        return self.placement.held if self.repack is None else self.placement.held | self.repack.unneeded()

    def accepts(self, side: Side) -> bool:
        """Return whether these blocks agree with the blocks that are claimed and that arrive."""
        known = [self.claimed] if self.claimed is not None else []
        known += [side_of(self.placement)] if self.placement is not None else []
        return all(have_same_prompt(side, other_side, num_tokens=self.grant.num_tokens) for other_side in known)

    def note_stats(self, stats: TransferStats) -> None:
        """Record the bytes and checksum failures on the wire."""
        if self.record is not None:
            self.record.wire_bytes, self.record.checksum_failures = stats.wire_bytes, stats.checksum_failures


def read_offer(
    request: OpenRequest, grant: Grant, layouts: LayoutRegistry
) -> tuple[TransferPlan, tuple[Arena, ...], str]:
    """Return the plan of an OPEN whose grant is valid, an arena for each rank of the plan, and the sender's traceparent.

    Raises:
        GrantError: The OPEN copies another prefix than granted.
        LayoutError: A layout is malformed.
        RemoteProtocolError: The body has another form.
        TransferRefused: No engine here can read the blocks, or they are not those of the grant.
    """
    wants_layouts = partial(layouts.wants_description, request.peer_name)
    opened = OpenBody.decode(request.open_body, wants_layouts=wants_layouts)
    arenas = layouts.arenas(opened)
    groups = _offered_groups(opened, arenas[0].layout, grant)
    try:
        plan = make_plan(tuple(arena.layout for arena in arenas), groups, grant.num_tokens)
    except RemoteProtocolError as error:
        raise TransferRefused("protocol", str(error)) from error
    if not plan.object_bytes or list(request.object_bytes) != plan.object_bytes or plan.total_bytes > grant.max_bytes:
        raise TransferRefused("protocol", "the objects are not those of the grant and the layout")
    return plan, arenas, opened.trace


def _offered_groups(opened: OpenBody, layout: Layout, grant: Grant) -> tuple[GroupBlocks, ...]:
    """Return the blocks listed in an OPEN, or the blocks of the granted prefix of a copy.

    Raises:
        GrantError: The copy is of another prefix.
    """
    if opened.copied is None:
        return opened.groups
    prefix = Prefix(layout.model, opened.copied.units, grant.num_tokens, grant.prompt_hash)
    if not is_well_formed(prefix) or prefix_hash(prefix) != grant.prefix_hash:
        raise GrantError("other_prefix", "the grant is for another prefix")
    return prefix_groups(layout, prefix, root=opened.copied.root)


class InboundTransfers:
    """All inbound transfers of this node. Runs on the agent's loop."""

    def __init__(
        self,
        *,
        grant_check: GrantCheck,
        pool: Pool,
        layouts: LayoutRegistry,
        transfer_log: TransferLog,
        open_timeout_seconds: float,
        in_background: Background,
    ) -> None:
        self._grant_check = grant_check
        self._pool = pool
        self._layouts = layouts
        self._log = transfer_log
        self._open_timeout_seconds = open_timeout_seconds
        self._in_background = in_background
        self._transfers: dict[TransferId, InboundTransfer] = {}
        # Slots of ended transfers that the transport may still write to.
        self._quarantined: dict[TransferId, Placement] = {}
        # By sender, because any peer may cancel a transfer that is unknown here.
        self._outcomes: EndedTransfers[EndReason] = EndedTransfers(MAX_OUTCOMES)
        # Set before the first OPEN can come.
        self.receiver: Receiver | None = None

    def __len__(self) -> int:
        return len(self._transfers) + len(self._quarantined)

    # The peer's OPEN

    def on_open(self, request: OpenRequest, reply: Reply) -> None:
        """Accept or reject an OPEN."""
        try:
            reply(self._accept(request))
        except (TransferRefused, GrantError, RemoteProtocolError, LayoutError) as error:
            reason, message = refusal_reason(error), _bounded_text(error)
            metrics.TRANSFERS.labels(direction="in", outcome=reason).inc()
            _log.warning("transfer.refused", transfer_id=request.transfer_id.hex(), reason=reason, message=message)
            reply(Rejection(reason, message))
        except Exception:
            # This is a bug here. Without a reply, the transport would wait for ever.
            metrics.TRANSFERS.labels(direction="in", outcome="protocol").inc()
            _log.exception("transfer.open_crashed", transfer_id=request.transfer_id.hex())
            reply(Rejection("protocol", "this agent cannot read the open"))

    def _accept(self, request: OpenRequest) -> Acceptance:
        token, kind = read_grant(request.open_body)
        transfer_id = TransferId(request.transfer_id)
        grant = self._grant_check.as_destination(token, kind, transfer_id, peer=request.peer_name)
        outcome = self._outcomes.get(grant.source, transfer_id)
        if outcome is not None:
            raise TransferRefused(outcome.reason, outcome.message)
        try:
            return self._accept_granted(request, grant)
        except (TransferRefused, GrantError, RemoteProtocolError, LayoutError) as error:
            # The claim fails now, and a repeated OPEN is refused without being read.
            reason, message = refusal_reason(error), _bounded_text(error)
            if transfer_id in self._transfers:
                self._fail(transfer_id, reason, message)
            else:
                self._remember(grant.source, transfer_id, reason, message)
            raise TransferRefused(reason, message) from error

    def _accept_granted(self, request: OpenRequest, grant: Grant) -> Acceptance:
        plan, arenas, trace = read_offer(request, grant, self._layouts)
        transfer = self._transfers.get(grant.transfer_id) or self._create(grant)
        if not transfer.accepts(Side(plan.layouts, plan.groups)):
            raise TransferRefused("prompt_mismatch", "the blocks are not those of the engine that waits for them")
        placement = transfer.placement or self._begin(transfer, plan, arenas, trace)
        if transfer.is_complete:
            return Acceptance(held=range(len(plan.object_bytes)), destination=placement.memory)
        held = transfer.held
        transfer.is_partial |= held != placement.held
        return Acceptance(held=held, destination=placement.memory)

    def _create(self, grant: Grant) -> InboundTransfer:
        now = time.monotonic()
        transfer = InboundTransfer(grant, now + seconds_left(grant), now + self._open_timeout_seconds)
        self._transfers[grant.transfer_id] = transfer
        return transfer

    def _begin(self, transfer: InboundTransfer, plan: TransferPlan, arenas: tuple[Arena, ...], trace: str) -> Placement:
        grant, placement = transfer.grant, place(self._pool, plan, arenas)
        if placement is None:
            raise TransferRefused("no_memory", f"no room for {len(plan.object_bytes)} transfer blocks")
        transfer.placement = placement
        self._repack_if_needed(transfer)
        transfer.is_memory_free = False
        transfer.opened_at = time.monotonic()
        held_bytes = sum(plan.object_bytes[index] for index in transfer.held)
        transfer.record = self._log.begin(
            plan, grant.transfer_id, "in", grant.source, held_bytes=held_bytes, trace=trace
        )
        return placement

    # Events of the receiver

    def on_event(self, event: ReceiveEvent) -> None:
        """Take an event of the receiver."""
        transfer_id = TransferId(event.transfer_id)
        transfer = self._transfers.get(transfer_id)
        if isinstance(event, ReceiveMemoryFree):
            self._memory_free(transfer_id)
        elif isinstance(event, ReceiveFailed):
            self._failed(transfer_id, transfer, event)
        elif transfer is not None:
            self._completed(transfer, event)

    def _failed(self, transfer_id: TransferId, transfer: InboundTransfer | None, event: ReceiveFailed) -> None:
        if transfer is None:
            # The peer's cancel has overtaken its OPEN.
            if self._outcomes.get(event.peer_name, transfer_id) is None:
                self._remember(event.peer_name, transfer_id, event.reason, event.message)
        elif transfer.grant.source == event.peer_name:
            transfer.note_stats(event.stats)
            self._fail(transfer_id, event.reason, event.message)

    def _completed(self, transfer: InboundTransfer, event: ReceiveCompleted) -> None:
        assert transfer.record is not None
        transfer.is_complete = True
        transfer.completed_at = time.monotonic()
        transfer.note_stats(event.stats)
        self._publish(transfer)
        self._log.end(transfer.record, "completed")
        self._deliver(transfer)

    def _memory_free(self, transfer_id: TransferId) -> None:
        placement = self._quarantined.pop(transfer_id, None)
        transfer = self._transfers.get(transfer_id)
        if placement is not None:
            placement.release()
        elif transfer is not None:
            transfer.is_memory_free = True
            # The sender of a copy may ask for it again until now.
            if transfer.is_copy and transfer.is_complete:
                self._end(transfer)

    # The engine's claim

    def claim(self, engine: EngineConnection, arenas: tuple[Arena, ...], request: Receive) -> None:
        """Take an engine's claim; post ReceiveReady or TransferFailed to it. `arenas` are those of its ranks."""
        try:
            grant = self._grant_check.as_destination(request.grant, "transfer", request.transfer_id, peer=None)
            claimed = self._transfers.get(request.transfer_id)
            if claimed is not None and claimed.reader is not None:
                raise GrantError("used", f"{claimed.reader.instance} has claimed this transfer already")
        except GrantError as error:
            engine.post(TransferFailed(request.transfer_id, refusal_reason(error), str(error)))
            return
        outcome = self._outcomes.get(grant.source, grant.transfer_id)
        if outcome is not None:
            engine.post(TransferFailed(request.transfer_id, outcome.reason, outcome.message))
            return
        transfer = self._transfers.get(request.transfer_id) or self._create(grant)
        transfer.reader, transfer.arenas = engine, arenas
        transfer.delivery = tracing.continued("agent.deliver", request.trace, transfer_id=request.transfer_id.hex())
        try:
            self._apply_claim(transfer, request)
        except TransferRefused as refusal:
            self._refuse_claim(transfer, refusal.reason, str(refusal))
            return
        self._publish(transfer)
        self._deliver(transfer)

    def _apply_claim(self, transfer: InboundTransfer, request: Receive) -> None:
        """Store the blocks that the reader expects, and repack into its layout if needed.

        Raises:
            TransferRefused: The reader gives the transfer up, expects another prompt, or its blocks cannot be made.
        """
        if not request.groups:
            raise TransferRefused("cancelled", "the receiving engine will not load it")
        claimed = Side(tuple(arena.layout for arena in transfer.arenas), request.groups)
        if request.prompt_hash != transfer.grant.prompt_hash or not transfer.accepts(claimed):
            raise TransferRefused("prompt_mismatch", "the engine's prompt is not the granted prompt")
        transfer.claimed = claimed
        self._repack_if_needed(transfer)

    def _refuse_claim(self, transfer: InboundTransfer, reason: FailureReason, message: str) -> None:
        if transfer.is_complete and transfer.reader is not None:
            # The transfer itself has succeeded, and its record says so.
            transfer.reader.post(TransferFailed(transfer.grant.transfer_id, reason, message))
            self._end(transfer, reason, message)
        else:
            self._fail(transfer.grant.transfer_id, reason, message)

    def _repack_if_needed(self, transfer: InboundTransfer) -> None:
        """Start a repack job if the reader's layout differs from the layout that arrives.

        Raises:
            TransferRefused: The layouts do not map, or there is no room.
        """
        if transfer.claimed is None or transfer.placement is None:
            return
        if transfer.placement.plan.layouts != transfer.claimed.layouts:
            transfer.repack = start_repack(transfer.claimed, transfer.arenas, transfer.placement)

    def _publish(self, transfer: InboundTransfer) -> None:
        """Make complete blocks available to later requests, once their hashes are verified."""
        placement = transfer.placement
        if placement is None or not transfer.is_complete or transfer.is_partial or not transfer.is_verified:
            return
        if not self._layouts.has_foreign(placement.plan.layouts):
            placement.publish(range(len(placement.slots)))

    def _deliver(self, transfer: InboundTransfer) -> None:
        """Post the slots to the reader once all blocks are complete and repacked."""
        placement = transfer.delivered
        if not transfer.is_complete or transfer.reader is None or transfer.is_being_read or placement is None:
            return
        if transfer.repack is not None and not transfer.repack.is_done:
            transfer.repack.begin(self._in_background, partial(self._repacked, transfer))
            return
        transfer.is_being_read = True
        transfer.delivery.event("ready")
        transfer.reader.post(placement.receive_ready(transfer.grant.transfer_id))

    def _repacked(self, transfer: InboundTransfer, succeeded: bool) -> None:
        if succeeded:
            self._deliver(transfer)
        else:
            self._refuse_claim(transfer, "protocol", "blocks could not be repacked")

    def claims(self, engine: EngineConnection) -> list[list[Any]]:
        """Return the progress of the engine's claims that have begun, as in `Alive`.

        A transfer that has arrived misses no bytes, also while it is repacked or its end is being told.
        """
        now, receiver = time.monotonic(), self.receiver
        found: list[list[Any]] = []
        for transfer_id, transfer in self._transfers.items():
            if transfer.reader is not engine or transfer.placement is None or receiver is None:
                continue
            progress = None if transfer.is_complete else receiver.progress(transfer_id)
            if progress is None:
                found.append([transfer_id, transfer.placement.plan.total_bytes, 0, 0.0, 0.0])
            else:
                first = now if progress.first_at is None else progress.first_at
                latest = transfer.opened_at if progress.latest_at is None else progress.latest_at
                found.append([transfer_id, progress.total_bytes, progress.missing_bytes, now - first, now - latest])
        return found

    def release(self, transfer_id: TransferId, instance: str) -> None:
        """End the engine's use of a transfer that it claimed."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.reader is None or transfer.reader.instance != instance:
            return
        if transfer.is_being_read and transfer.record is not None:
            self._log.loaded(transfer.record)
        self._unclaim(transfer)

    def engine_lost(self, engine: EngineConnection) -> None:
        """End the claims of a lost connection. A worker that still reads notices the slots' new generations."""
        for transfer in list(self._transfers.values()):
            if transfer.reader is engine:
                self._unclaim(transfer)

    def _unclaim(self, transfer: InboundTransfer) -> None:
        transfer.reader = None
        if transfer.is_complete:
            self._end(transfer)
        else:
            self._fail(transfer.grant.transfer_id, "cancelled", "the receiving engine gave up")

    # Ends

    def forget(self, model: str) -> None:
        """Fail all transfers of a model that no engine reads yet: they were computed with earlier weights."""
        message = "the blocks of this model were forgotten"
        for transfer in list(self._transfers.values()):
            placement = transfer.placement
            if placement is None or placement.plan.layouts[0].model != model or transfer.is_being_read:
                continue
            if transfer.is_complete and transfer.reader is None:
                self._end(transfer, "cancelled", message)
            else:
                self._refuse_claim(transfer, "cancelled", message)

    def expire(self, now: float) -> None:
        """Fail late transfers; `now` is monotonic seconds."""
        self._layouts.expire(now)
        for transfer in list(self._transfers.values()):
            if transfer.is_complete:
                ends_at = transfer.deadline if transfer.is_copy else transfer.completed_at + CLAIM_TIMEOUT_SECONDS
                if transfer.reader is None and now >= ends_at:
                    self._end(transfer, "cancelled", "no engine has claimed the transfer")
            elif now >= transfer.deadline:
                message = "the transfer did not arrive before its grant expired"
                self._fail(transfer.grant.transfer_id, "deadline", message)
            elif now >= transfer.open_deadline and transfer.placement is None:
                message = f"{transfer.grant.source} has not opened the transfer"
                self._fail(transfer.grant.transfer_id, "unreachable", message)

    def _fail(self, transfer_id: TransferId, reason: FailureReason, message: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.is_complete:
            return
        if transfer.reader is not None:
            transfer.reader.post(TransferFailed(transfer_id, reason, message))
        if transfer.record is not None:
            self._log.end(transfer.record, reason, message=message)
        if transfer.placement is not None and not transfer.is_memory_free and self.receiver is not None:
            self.receiver.cancel(transfer_id, reason, message)
        self._end(transfer, reason, message)

    def _end(self, transfer: InboundTransfer, failure: FailureReason | None = None, message: str = "") -> None:
        transfer_id = transfer.grant.transfer_id
        transfer.delivery.end(f"{failure}: {message}" if failure else "")
        del self._transfers[transfer_id]
        message = message or "this transfer has ended here"
        self._remember(transfer.grant.source, transfer_id, failure or "cancelled", message)
        if transfer.repack is not None:
            transfer.repack.end()
        if transfer.placement is None:
            return
        if transfer.is_memory_free:
            transfer.placement.release()
        else:
            self._pool.quarantine(transfer.placement.lease)
            self._quarantined[transfer_id] = transfer.placement

    def _remember(self, sender: str, transfer_id: TransferId, reason: FailureReason, message: str) -> None:
        """Remember an outcome with a bounded message, because a peer may have written it."""
        self._outcomes.put(sender, transfer_id, EndReason(reason, shorten(message)))


def _bounded_text(error: PrfaasError | TransferRefused) -> str:
    """Return the message of an error, cut because a peer may have written parts of it."""
    return str(error)[:MAX_MESSAGE_CHARACTERS]

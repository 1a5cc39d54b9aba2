"""Transfers that leave: from an engine's layers in their slots to bytes that the other agent has acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prfaas import grants, logs, metrics, tracing
from prfaas.agent.engine.protocol import HELD, Send, SendOpened, TransferDone, TransferFailed
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.links import wire_priority
from prfaas.agent.transfer.grant_check import Refusal, reason_of
from prfaas.agent.transfer.layer_progress import LayerProgress
from prfaas.agent.transfer.layouts import AcceptedLayouts
from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import OpenBody, TransferPlan, make_plan
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, TransferId

_log = logs.get("agent.sending")


@dataclass(eq=False)
class OutboundTransfer:
    """One transfer that leaves. Its slots are free when engine and transport are both done with them."""

    transfer_id: TransferId
    handle: int
    filling: LayerProgress
    engine: EngineConnection
    link: Link
    record: TransferRecord
    engine_done: bool = False
    memory_free: bool = False

    @property
    def placement(self) -> Placement:
        return self.filling.placement

    @property
    def plan(self) -> TransferPlan:
        return self.filling.placement.plan

    @property
    def peer(self) -> str:
        return self.record.peer

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """Of each rank's layout."""
        return tuple(layout.fingerprint for layout in self.plan.layouts)

    def ready(self, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int) -> None:
        """These bytes may leave."""
        self.link.ready(
            self.transfer_id,
            first_object=first_object,
            num_objects=num_objects,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
        )

    def __repr__(self) -> str:
        return (
            f"<Outbound {self.transfer_id.hex()[:8]} unready={self.filling.num_unready} engine_done={self.engine_done}>"
        )


class OutboundTransfers:
    """Every transfer that leaves this node. Runs on the agent's loop; link events are handed over to it."""

    def __init__(
        self,
        *,
        name: AgentName,
        grant_key: bytes,
        pool: Pool,
        handles: Iterator[int],
        link_to: Callable[[str, AgentName], Link],
        transfer_log: TransferLog,
    ) -> None:
        """`handles` number what the rings speak of."""
        self._name = name
        self._grant_key = grant_key
        self._pool = pool
        self._link_to = link_to
        self._log = transfer_log
        self._handles = handles
        self._by_id: dict[TransferId, OutboundTransfer] = {}
        self._by_handle: dict[int, OutboundTransfer] = {}
        self._accepted = AcceptedLayouts()

    def __len__(self) -> int:
        return len(self._by_id)

    # What the engine says

    def open(self, engine: EngineConnection, workers: list[EngineConnection], request: Send) -> None:
        """Grant slots on all ranks for a transfer and open it; the engine hears SendOpened or TransferFailed."""
        try:
            grant = self._check(request)
        except GrantError as error:
            self._refuse(engine, request, error)
            return
        try:
            self._start(engine, self._place(engine, workers, grant, request), grant, request)
        except (GrantError, RemoteProtocolError, Refusal) as error:
            self._refuse(engine, request, error)
            self._link_to(grant.destination_address, grant.destination).decline(
                grant.transfer_id, reason_of(error), str(error), deadline_seconds=grant.expires_at - time.time()
            )

    def _check(self, request: Send) -> Grant:
        grant = grants.verify_end(
            request.grant,
            self._grant_key,
            kind="transfer",
            end="source",
            agent=self._name,
            transfer_id=request.transfer_id,
            now=time.time(),
        )
        if request.transfer_id in self._by_id:
            raise GrantError("used", "this transfer is open already")
        return grant

    def _place(
        self, engine: EngineConnection, workers: list[EngineConnection], grant: Grant, request: Send
    ) -> Placement:
        layouts = tuple(worker.layout for worker in workers if worker.layout is not None)
        arenas = tuple(worker.arena for worker in workers if worker.arena is not None)
        plan = make_plan(layouts, request.groups, grant.num_tokens)
        if plan.total_bytes > grant.max_bytes:
            raise GrantError("too_large", f"{plan.total_bytes} bytes; the grant allows {grant.max_bytes}")
        placement = place(self._pool, plan, arenas, owner=engine.owner)
        if placement is None:
            raise Refusal("no_memory", "no room for the transfer's blocks")
        return placement

    def _refuse(
        self, engine: EngineConnection, request: Send, error: GrantError | RemoteProtocolError | Refusal
    ) -> None:
        reason, message = reason_of(error), str(error)
        if isinstance(error, GrantError):
            metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
        metrics.TRANSFERS.labels(direction="out", outcome=reason).inc()
        _log.warning("transfer.refused", transfer_id=request.transfer_id.hex(), reason=reason, message=message)
        engine.post(TransferFailed(request.transfer_id, reason, message))

    def _start(self, engine: EngineConnection, placement: Placement, grant: Grant, request: Send) -> None:
        plan = placement.plan
        outbound = OutboundTransfer(
            transfer_id=request.transfer_id,
            handle=next(self._handles) & 0xFFFFFFFF,
            filling=LayerProgress(placement),
            engine=engine,
            link=self._link_to(grant.destination_address, grant.destination),
            record=self._log.begin(
                TransferRecord(
                    transfer_id=request.transfer_id,
                    direction="out",
                    peer=grant.destination,
                    num_tokens=plan.num_tokens,
                    payload_bytes=plan.total_bytes,
                    attention_bytes=plan.attention_bytes,
                    priority=wire_priority(request.priority),
                    span=_span(grant, plan, request.trace),
                )
            ),
        )
        self._by_id[outbound.transfer_id] = outbound
        self._by_handle[outbound.handle] = outbound
        outbound.link.open(self._outgoing(outbound, grant, request))
        self._ready_held(outbound)
        copies = [HELD if index in placement.held else slot for index, slot in enumerate(placement.slots)]
        engine.post(SendOpened(request.transfer_id, outbound.handle, plan.nested(copies)))

    def _outgoing(self, outbound: OutboundTransfer, grant: Grant, request: Send) -> SendRequest:
        is_known = self._accepted.knows(outbound.peer, outbound.link.peer_process, outbound.fingerprints)
        trace = outbound.record.span.traceparent
        body = OpenBody(request.grant, outbound.fingerprints, outbound.plan.layouts, request.groups, trace=trace)
        return SendRequest(
            transfer_id=outbound.transfer_id,
            open_body=replace(body, layouts=()).encode() if is_known else body.encode(),
            object_bytes=outbound.plan.object_bytes,
            source=outbound.placement.memory,
            priority=wire_priority(request.priority),
            deadline_seconds=max(0.1, grant.expires_at - time.time()),
            castable=outbound.plan.castable,
            whole_body=body.encode if is_known else None,
        )

    def _ready_held(self, outbound: OutboundTransfer) -> None:
        for first, count in outbound.placement.held_stretches():
            outbound.ready(first, count, 0, outbound.plan.object_bytes[first])

    def on_ring(self, worker: EngineConnection, entry: RingEntry) -> None:
        """A worker has filled one layer of some blocks: they leave; or it writes nothing more for a transfer."""
        if entry.kind is EntryKind.SCHEDULER_BACK:
            for orphan in [its for its in self._by_id.values() if its.engine.session < entry.handle]:
                self._rank_done(orphan, worker)
            return
        outbound = self._by_handle.get(entry.handle)
        if outbound is None or outbound.engine.attach.instance != worker.attach.instance:
            return
        if entry.kind is EntryKind.LAYER_READY:
            outbound.record.first_layer_ns = outbound.record.first_layer_ns or entry.time_ns
            outbound.filling.layer_ready(worker.attach.rank, entry, outbound.ready)
        elif entry.kind is EntryKind.FORWARD_ENDED:
            outbound.record.end_forward(entry.time_ns)
            outbound.record.span.event("forward_ended")
        else:
            self._rank_done(outbound, worker)

    def _rank_done(self, outbound: OutboundTransfer, worker: EngineConnection) -> None:
        """A rank writes nothing more to these slots, where they are its engine's."""
        instance = worker.attach.instance
        if outbound.engine.attach.instance == instance and outbound.filling.rank_done(worker.attach.rank):
            self.engine_done(outbound.transfer_id, instance)

    def engine_done(self, transfer_id: TransferId, instance: str) -> None:
        """No rank of its engine writes to this transfer's slots any more: what is whole still travels, what is not never
        will be. Of another engine's transfer nothing happens."""
        outbound = self._by_id.get(transfer_id)
        if outbound is None or outbound.engine.attach.instance != instance:
            return
        outbound.engine_done = True
        if outbound.filling.num_unready:
            outbound.link.cancel(outbound.transfer_id, "incomplete", "the request ended before all its layers came")
        self._maybe_end(outbound)

    def engine_lost(self, engine: EngineConnection, *, entirely: bool) -> None:
        """A process of an engine is gone: its unfinished transfers cannot be completed.

        Its ranks may write to their slots until they say that they do not, or the engine is `entirely` gone.
        """
        instance = engine.attach.instance
        for outbound in list(self._by_id.values()):
            if outbound.engine.attach.instance != instance:
                continue
            if outbound.filling.num_unready:
                outbound.link.cancel(outbound.transfer_id, "incomplete", "the sending engine is gone")
            outbound.engine_done = outbound.engine_done or entirely
            self._maybe_end(outbound)

    # What the link says

    def on_event(self, event: SendEvent) -> None:
        outbound = self._by_id.get(TransferId(event.transfer_id))
        if outbound is None:
            return
        self._log.follow(outbound.record, event)
        if isinstance(event, SendAccepted):
            self._accepted.accept(outbound.peer, event.process, outbound.fingerprints)
        elif isinstance(event, SendCompleted):
            outbound.engine.post(TransferDone(outbound.transfer_id))
            self._maybe_end(outbound)
        elif isinstance(event, SendFailed):
            if event.reason == "no_layout":  # it has given them up, for others
                self._accepted.forget(outbound.peer, outbound.fingerprints)
            outbound.engine.post(TransferFailed(outbound.transfer_id, event.reason, event.message))
        elif isinstance(event, SendMemoryFree):
            outbound.memory_free = True
            self._maybe_end(outbound)

    def _maybe_end(self, outbound: OutboundTransfer) -> None:
        """The last bytes may arrive before the engine says that its forward pass has ended: the record waits for both."""
        if outbound.engine_done and outbound.record.has_arrived:
            self._log.complete(outbound.record)
        if outbound.engine_done and outbound.memory_free and outbound.transfer_id in self._by_id:
            del self._by_id[outbound.transfer_id]
            del self._by_handle[outbound.handle]
            outbound.placement.release()


def _span(grant: Grant, plan: TransferPlan, trace: str) -> tracing.Span:
    """The sender's part of a request's trace."""
    return tracing.continued(
        "agent.send",
        trace,
        kind="client",
        transfer_id=grant.transfer_id.hex(),
        peer=grant.destination,
        num_tokens=plan.num_tokens,
        payload_bytes=plan.total_bytes,
    )

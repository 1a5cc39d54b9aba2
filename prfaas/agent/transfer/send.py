"""Outbound transfers: from an engine's layers in their slots to bytes that the peer has acknowledged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prfaas import logs, metrics
from prfaas.agent.engine.protocol import Send, TransferDone, TransferFailed
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.engine.server import EngineConnection, arenas_of, layouts_of
from prfaas.agent.links import wire_priority
from prfaas.agent.transfer.grant_check import (
    GrantCheck,
    TransferRefused,
    check_granted_bytes,
    refusal_reason,
    seconds_left,
)
from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.agent.transfer.placement import LayerProgress, Placement, place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, TransferId

MIN_DEADLINE_SECONDS = 0.1
_log = logs.get("agent.send")


@dataclass(eq=False)
class OutboundTransfer:
    """One transfer at its sender. Its slots are free when both the engine and the transport are done with them."""

    transfer_id: TransferId
    handle: int
    progress: LayerProgress
    engine: EngineConnection
    link: Link
    record: TransferRecord
    is_engine_done: bool = False
    is_memory_free: bool = False

    @property
    def placement(self) -> Placement:
        """Slots of the transfer."""
        return self.progress.placement

    def bytes_ready(self, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int) -> None:
        """Let the link send these bytes of each object."""
        self.link.ready(
            self.transfer_id,
            first_object=first_object,
            num_objects=num_objects,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
        )

    def cancel_if_incomplete(self, message: str) -> None:
        """Cancel the transfer unless all its layers have been written."""
        if self.progress.num_incomplete:
            self.link.cancel(self.transfer_id, "incomplete", message)


class OutboundTransfers:
    """All outbound transfers of this node. Runs on the agent's loop."""

    def __init__(
        self,
        *,
        grant_check: GrantCheck,
        pool: Pool,
        handles: Iterator[int],
        link_to: Callable[[str, AgentName], Link],
        transfer_log: TransferLog,
    ) -> None:
        """`handles` number the transfers and stores that ring entries name."""
        self._grant_check = grant_check
        self._pool = pool
        self._link_to = link_to
        self._log = transfer_log
        self._handles = handles
        self._by_id: dict[TransferId, OutboundTransfer] = {}
        self._by_handle: dict[int, OutboundTransfer] = {}
        self._heard_at: dict[str, float] = {}  # Monotonic time of the latest ring entry of each instance.

    def __len__(self) -> int:
        return len(self._by_id)

    # Messages and ring entries of the engine

    def open(self, engine: EngineConnection, workers: list[EngineConnection], request: Send) -> None:
        """Allocate slots on all ranks and open the transfer; post SendOpened or TransferFailed to the engine."""
        grant: Grant | None = None
        try:
            if request.transfer_id in self._by_id:
                raise GrantError("used", "this transfer is open already")
            grant = self._grant_check.as_source(request.grant, "transfer", request.transfer_id)
            self._start(engine, self._place(engine, workers, grant, request), grant, request)
        except (GrantError, RemoteProtocolError, TransferRefused) as error:
            reason, message = refusal_reason(error), str(error)
            metrics.TRANSFERS.labels(direction="out", outcome=reason).inc()
            _log.warning("transfer.refused", transfer_id=request.transfer_id.hex(), reason=reason, message=message)
            engine.post(TransferFailed(request.transfer_id, reason, message))
            if grant is not None:
                link = self._link_to(grant.destination_address, grant.destination)
                link.decline(grant.transfer_id, reason, message, deadline_seconds=seconds_left(grant))

    def _place(
        self, engine: EngineConnection, workers: list[EngineConnection], grant: Grant, request: Send
    ) -> Placement:
        plan = make_plan(layouts_of(workers), request.groups, grant.num_tokens)
        check_granted_bytes(plan.total_bytes, grant)
        placement = place(self._pool, plan, arenas_of(workers))
        if placement is None:
            raise TransferRefused("no_memory", "no room for the transfer's blocks")
        return placement

    def _start(self, engine: EngineConnection, placement: Placement, grant: Grant, request: Send) -> None:
        plan = placement.plan
        record = self._log.begin(
            plan,
            request.transfer_id,
            "out",
            grant.destination,
            priority=wire_priority(request.priority),
            trace=request.trace,
        )
        transfer = OutboundTransfer(
            transfer_id=request.transfer_id,
            handle=next(self._handles) & 0xFFFFFFFF,
            progress=LayerProgress(placement),
            engine=engine,
            link=self._link_to(grant.destination_address, grant.destination),
            record=record,
        )
        self._by_id[transfer.transfer_id] = transfer
        self._by_handle[transfer.handle] = transfer
        transfer.link.open(self._send_request(transfer, grant, request))
        for first, count in placement.held_ranges():
            transfer.bytes_ready(first, count, 0, plan.object_bytes[first])
        engine.post(placement.send_opened(request.transfer_id, transfer.handle))

    def _send_request(self, transfer: OutboundTransfer, grant: Grant, request: Send) -> SendRequest:
        plan = transfer.placement.plan
        trace = transfer.record.span.traceparent
        body = OpenBody(request.grant, plan.fingerprints, plan.layouts, request.groups, trace=trace)
        return SendRequest(
            transfer_id=transfer.transfer_id,
            open_body=body.encode(),
            object_bytes=plan.object_bytes,
            source=transfer.placement.memory,
            priority=wire_priority(request.priority),
            deadline_seconds=max(MIN_DEADLINE_SECONDS, seconds_left(grant)),
            tenant=grant.tenant,
        )

    def on_ring(self, worker: EngineConnection, entry: RingEntry, *, now: float) -> None:
        """Take a worker's ring entry; `now` is monotonic seconds. Entries of other engines' transfers are ignored."""
        self._heard_at[worker.instance] = now
        if entry.kind is EntryKind.SCHEDULER_REATTACHED:
            for transfer in [t for t in self._by_id.values() if t.engine.session < entry.handle]:
                self._rank_done(transfer, worker)
            return
        found = self._by_handle.get(entry.handle)
        if found is None or found.engine.instance != worker.instance:
            return
        if entry.kind is EntryKind.LAYER_READY:
            found.record.first_layer_ns = found.record.first_layer_ns or entry.time_ns
            found.progress.layer_ready(worker.attach.rank, entry, found.bytes_ready)
        elif entry.kind is EntryKind.FORWARD_ENDED:
            found.record.end_forward(entry.time_ns)
            found.record.span.event("forward_ended")
        else:
            self._rank_done(found, worker)

    def _rank_done(self, transfer: OutboundTransfer, worker: EngineConnection) -> None:
        """Record that a rank writes nothing more, if the transfer is its engine's."""
        if transfer.engine.instance == worker.instance and transfer.progress.rank_done(worker.attach.rank):
            self.engine_done(transfer.transfer_id, worker.instance)

    def engine_done(self, transfer_id: TransferId, instance: str) -> None:
        """Record that no rank of the instance writes to this transfer any more, and cancel it if it is incomplete.

        A transfer of another instance is left alone.
        """
        transfer = self._by_id.get(transfer_id)
        if transfer is None or transfer.engine.instance != instance:
            return
        transfer.is_engine_done = True
        transfer.cancel_if_incomplete("the request ended before all its layers were written")
        self._maybe_end(transfer)

    def engine_lost(self, engine: EngineConnection, *, is_last: bool) -> None:
        """Cancel the incomplete transfers of an engine that lost a connection.

        Its ranks may write to their slots until they report otherwise, or until its last connection is gone.
        """
        for transfer in [t for t in self._by_id.values() if t.engine.instance == engine.instance]:
            transfer.cancel_if_incomplete("the sending engine is gone")
            transfer.is_engine_done = transfer.is_engine_done or is_last
            self._maybe_end(transfer)
        if is_last:
            self._heard_at.pop(engine.instance, None)

    def engine_silent(self, instance: str, *, now: float, seconds: float) -> None:
        """Cancel the incomplete transfers of an engine that answers no health checks and has written nothing for `seconds`."""
        if now - self._heard_at.get(instance, 0.0) < seconds:
            return
        for transfer in self._by_id.values():
            if transfer.engine.instance == instance:
                transfer.cancel_if_incomplete("the sending engine does not answer")

    # Events of the link

    def on_event(self, event: SendEvent) -> None:
        """Take an event of a link; events of copies and probes are ignored."""
        transfer = self._by_id.get(TransferId(event.transfer_id))
        if transfer is None:
            return
        self._log.follow(transfer.record, event)
        if isinstance(event, SendCompleted):
            transfer.engine.post(TransferDone(transfer.transfer_id))
            self._maybe_end(transfer)
        elif isinstance(event, SendFailed):
            transfer.engine.post(TransferFailed(transfer.transfer_id, event.reason, event.message))
        elif isinstance(event, SendMemoryFree):
            transfer.is_memory_free = True
            self._maybe_end(transfer)

    def _maybe_end(self, transfer: OutboundTransfer) -> None:
        """Close the record and free the slots, each when its conditions hold.

        The last bytes may arrive before the engine reports the end of its forward pass, so the record waits for both.
        """
        if transfer.is_engine_done and transfer.record.has_arrived:
            self._log.complete(transfer.record)
        if transfer.is_engine_done and transfer.is_memory_free and transfer.transfer_id in self._by_id:
            del self._by_id[transfer.transfer_id]
            del self._by_handle[transfer.handle]
            transfer.placement.release()

"""Stream of one node's pool changes: order, acknowledgement, and requests to announce everything."""

import asyncio

from prfaas import logs, metrics
from prfaas.manager.record.cluster_writer import ClusterWriter
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.world import World, batch_record
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import digests_from
from prfaas.types import AgentName

_MIN_RESYNC_SECONDS = 5.0  # Limits the cost of a lasting disagreement.

log = logs.get("manager.grpc")


class EventStream:
    """State of one ReportEvents call."""

    def __init__(self, world: World, replication: Replication) -> None:
        self._world = world
        self._replication = replication
        self.node: AgentName = AgentName("")
        self._epoch = 0
        self._resync_allowed_at = 0.0
        self._awaits_reset = False

    async def take(self, request: pb.ReportEventsRequest) -> list[pb.ReportEventsResponse]:
        """Return the responses to one message.

        Raises:
            FencedError: another manager writes this cluster.
            IndexRefusal: the node must register first, or the message cannot be read.
        """
        kind = request.WhichOneof("message")
        if kind == "hello":
            self.node, self._epoch = AgentName(request.hello.node), request.hello.epoch
        writer = await self._replication.writer_for(self._world.cluster_of(self.node))
        if kind == "hello":
            return [pb.ReportEventsResponse(resume_after=self._world.sequence(self.node, self._epoch))]
        self._world.record_report(self.node, epoch=self._epoch, links=None, is_heartbeat=kind == "alive")
        if kind == "alive":
            return [pb.ReportEventsResponse(alive=pb.Alive())]
        if kind == "batch":
            return await self._take_batch(request.batch, writer)
        if kind == "digests" and not self._awaits_reset:
            return self._compare(request.digests)
        return []

    async def _take_batch(self, batch: pb.Batch, writer: ClusterWriter) -> list[pb.ReportEventsResponse]:
        if self._awaits_reset and not batch.reset:
            return []
        self._awaits_reset = False
        outcome = self._world.apply_batch(self.node, epoch=self._epoch, batch=batch)
        if outcome == "gap":
            return self._request_full_announcement("gap", f"batch {batch.sequence} came out of order")
        if outcome == "applied":
            await writer.append(batch_record(self.node, self._epoch, batch))
        return [pb.ReportEventsResponse(acknowledged=batch.sequence)]

    def _compare(self, digests: pb.Digests) -> list[pb.ReportEventsResponse]:
        now = asyncio.get_running_loop().time()
        if now < self._resync_allowed_at or not self._world.differs(self.node, digests_from(digests.holdings)):
            return []
        return self._request_full_announcement("digest", "the digests differ")

    def _request_full_announcement(self, reason: str, message: str) -> list[pb.ReportEventsResponse]:
        metrics.MANAGER_RESYNCS.labels(reason=reason).inc()
        log.warning("events.full_announcement_requested", node=self.node, reason=reason)
        self._awaits_reset = True
        self._resync_allowed_at = asyncio.get_running_loop().time() + _MIN_RESYNC_SECONDS
        return [pb.ReportEventsResponse(announce_everything=message)]

"""Queue of the outcomes of requests, each of which one manager counts."""

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.rpc.channel import Channel
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks

MAX_REPORTS = 4096  # Beyond it the oldest report is dropped.
INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # Without an answer, a manager may have counted a report or not.
REPEAT_SECONDS = 0.2
PATIENCE_SECONDS = 60.0  # A manager that is frozen for longer is given up.
Answered = pb.ReportRequestsRequest.Answered
_log = logs.get("router.reports")


class RequestReports:
    """Reports on completed requests, which go to the managers each second.

    Only a manager that leaves a report unanswered knows whether it counted it. So the report is repeated there, under the
    same number, while later ones go to the next manager. A manager that cannot be connected has counted nothing.
    """

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        self._queue: deque[Answered] = deque()
        self._unanswered: dict[Channel, asyncio.Task[None]] = {}
        self._reporter = secrets.token_bytes(8)
        self._num_sent = 0

    @property
    def num_unanswered(self) -> int:
        """Number of managers that have not answered a report."""
        return len(self._unanswered)

    def add(self, report: Answered) -> None:
        """Queue a report."""
        self._queue.append(report)
        self._drop(len(self._queue) - MAX_REPORTS)

    async def send_forever(self) -> None:
        """Send what is queued each second, to the first manager that answers."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_SECONDS)
                await self.send()
        finally:
            await cancel_tasks(self._unanswered.values())

    async def send(self) -> None:
        """Send what is queued. It stays queued if no manager can be connected."""
        for channel in self._client.channels:
            if self._queue and channel not in self._unanswered:
                self._num_sent += 1
                reports = list(self._queue)
                self._queue.clear()
                request = pb.ReportRequestsRequest(requests=reports, reporter=self._reporter, number=self._num_sent)
                if not await self._is_settled(channel, request):
                    _log.warning("manager.report_unanswered", manager=channel.address, num_requests=len(reports))
                    self._unanswered[channel] = asyncio.create_task(self._repeat(channel, request))

    async def _repeat(self, channel: Channel, request: pb.ReportRequestsRequest) -> None:
        """Ask a manager again. If it does not answer for long, the report goes to another, and may count twice."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                is_settled = False
                while not is_settled:
                    await asyncio.sleep(REPEAT_SECONDS)
                    is_settled = await self._is_settled(channel, request)
        except TimeoutError:
            self._put_back(request.requests)
        finally:
            del self._unanswered[channel]

    async def _is_settled(self, channel: Channel, request: pb.ReportRequestsRequest) -> bool:
        """Send a report, and return whether it is counted, dropped, or in the queue again."""
        try:
            await channel.call("ReportRequests", request, timeout_seconds=ANSWER_SECONDS)
        except IndexRefusal as error:
            _log.warning("manager.report_refused", manager=channel.address, error=str(error))
            metrics.REPORTS_DROPPED.inc(len(request.requests))
        except ManagerUnreachable as error:
            if error.was_connected:
                return False
            self._put_back(request.requests)
        return True

    def _put_back(self, reports: Sequence[Answered]) -> None:
        self._queue.extendleft(reversed(reports))
        self._drop(len(self._queue) - MAX_REPORTS)

    def _drop(self, num_reports: int) -> None:
        for _ in range(num_reports):
            self._queue.popleft()
            metrics.REPORTS_DROPPED.inc()

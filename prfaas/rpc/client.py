"""Client of the managers for routers and commands. Switches to the next manager if one does not answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from prfaas import logs
from prfaas.errors import FencedError, ManagerUnreachable
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.streams import QuestionKind, QuestionStream
from prfaas.transport.net.tls import CertificateFiles

_log = logs.get("rpc.client")
_RETRY_SECONDS = 0.2
_LEAST_SECONDS = 0.05  # With less time left, a call cannot succeed.
_SILENCE_SECONDS = 2.0  # A snapshot arrives each second; a manager that hangs still answers pings.


class ManagerClient:
    """Several managers as one. Every call has a deadline over all managers together."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        name: str,
        secret: bytes,
        deadline_seconds: float = 1.0,
        tls: CertificateFiles | None = None,
    ) -> None:
        self._channels = [Channel(address, name=name, secret=secret, tls=tls) for address in addresses]
        self._streams = [QuestionStream(channel) for channel in self._channels]
        self._deadline_seconds = deadline_seconds
        self._preferred = 0

    @property
    def channels(self) -> Sequence[Channel]:
        """Return the managers, beginning with the one that answered last."""
        return (*self._channels[self._preferred :], *self._channels[: self._preferred])

    async def match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """Return how much of a prompt is cached on each node. Raises as `Channel.call`."""
        response: pb.MatchResponse = await self._ask("match", request)
        return response

    async def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Return where a request runs, the reason, and its grant. Raises as `Channel.call`."""
        response: pb.RouteResponse = await self._ask("route", request)
        return response

    async def copy(self, request: pb.CopyRequest, *, timeout_seconds: float) -> pb.CopyResponse:
        """Copy a prefix from one node to another and wait for the end. Raises as `Channel.call`, except FencedError."""
        response: pb.CopyResponse = await self._ask_writer("Copy", request, timeout_seconds)
        return response

    async def operate(self, method: str, request: Any) -> Any:
        """Carry out an operation on a node, such as Drain or SetRole. Raises as `Channel.call`, except FencedError.

        The request's `timeout_seconds`, if it has one, comes on top of the usual deadline.
        """
        seconds = getattr(request, "timeout_seconds", 0.0) + self._deadline_seconds
        return await self._ask_writer(method, request, seconds)

    async def _ask_writer(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """Ask the managers in turn, and follow a redirect to the cluster's writer.

        Operations are idempotent, so one that a manager may have begun is asked again, unless the time is over.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout_seconds
        failure = ManagerUnreachable("no manager is configured")
        for channel in self.channels:
            left = ends - clock()
            if left < _LEAST_SECONDS:
                break
            try:
                return await self._follow(channel, method, request, timeout_seconds=left)
            except ManagerUnreachable as error:
                failure = error
        raise failure

    async def _follow(self, channel: Channel, method: str, request: Any, *, timeout_seconds: float) -> Any:
        """Ask a manager, and then the one that it names as the cluster's writer."""
        try:
            return await channel.call(method, request, timeout_seconds=timeout_seconds)
        except FencedError as error:
            writer = next((channel for channel in self._channels if channel.address == error.writer), None)
            if writer is None:
                raise ManagerUnreachable(
                    f"the cluster's writer, {error.writer}, is not among the configured managers"
                ) from error
        try:
            return await writer.call(method, request, timeout_seconds=timeout_seconds)
        except FencedError as error:  # The writer changed in this moment.
            raise ManagerUnreachable(f"{writer.address} no longer writes the cluster") from error

    async def _ask(self, kind: QuestionKind, request: Any) -> Any:
        """Return the first manager's answer."""
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds
        share = self._deadline_seconds / len(self._channels)
        failure = ManagerUnreachable("no manager is configured")
        for attempt in range(len(self._channels)):
            position = (self._preferred + attempt) % len(self._channels)
            seconds_left = deadline - asyncio.get_running_loop().time()
            is_last = attempt == len(self._channels) - 1
            seconds = max(0.01, seconds_left if is_last else min(share, seconds_left))
            try:
                response = await self._streams[position].ask(kind, request, timeout_seconds=seconds)
            except ManagerUnreachable as error:
                failure = error
                continue
            self._preferred = position
            return response
        raise failure

    async def watch_state(self) -> AsyncGenerator[pb.StateSnapshot, None]:
        """Yield snapshots without end: at once, at every change, and at least each second.

        Switches to another manager if one is silent. A gap of more than a second means that no manager answers. Each
        reason is logged once.
        """
        attempt, logged = 0, set[str]()
        while True:
            channel = self._channels[attempt % len(self._channels)]
            try:
                async for snapshot in _snapshots(channel, pb.WatchStateRequest()):
                    logged.clear()
                    yield snapshot
            except (ManagerUnreachable, TimeoutError) as error:
                reason = str(error) or f"manager {channel.address}: no snapshot for {_SILENCE_SECONDS:g} s"
                if reason not in logged:
                    _log.warning("manager.lost", error=reason)
                logged.add(reason)
            attempt += 1
            await asyncio.sleep(_RETRY_SECONDS)

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()
        for channel in self._channels:
            await channel.close()


async def _snapshots(channel: Channel, request: pb.WatchStateRequest) -> AsyncGenerator[pb.StateSnapshot, None]:
    """Yield the snapshots of one manager.

    Raises:
        ManagerUnreachable: the stream ends.
        TimeoutError: no snapshot arrives.
    """
    call = channel.stream("WatchState", request)
    try:
        snapshots = aiter(call)
        while True:
            async with asyncio.timeout(_SILENCE_SECONDS):
                with channel.translated_errors():
                    snapshot = await anext(snapshots, None)
            if snapshot is None:
                return
            yield snapshot
    finally:
        call.cancel()

"""What a router calls: match, route, watch the state. Goes to the next manager when one does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from prfaas import logs
from prfaas.errors import Fenced, ManagerUnreachable
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.streams import QuestionKind, QuestionStream
from prfaas.transport.net.tls import CertificateFiles

_log = logs.get("rpc.client")
_RETRY_SECONDS = 0.2
_LEAST_SECONDS = 0.05  # with less left a call has no chance
_SILENCE_SECONDS = 3.0  # between snapshots, of which one comes each second: a manager that hangs still answers pings


class ManagerClient:
    """Several managers as one. Every call has a deadline, over all managers together."""

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
        self._questions = [QuestionStream(channel) for channel in self._channels]
        self._deadline_seconds = deadline_seconds
        self._preferred = 0

    async def match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """How much of a prompt is cached where. Raises as `Channel.call`."""
        response: pb.MatchResponse = await self._ask("match", request)
        return response

    async def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Where a request runs, why, and its grant. Raises as `Channel.call`."""
        response: pb.RouteResponse = await self._ask("route", request)
        return response

    async def report_requests(self, request: pb.ReportRequestsRequest) -> None:
        """Say how requests were answered. Raises as `Channel.call`."""
        await self._call("ReportRequests", request)

    async def copy(self, request: pb.CopyRequest, *, timeout_seconds: float) -> pb.CopyResponse:
        """Have a node send a prefix to another; returns when that has ended. Raises as `Channel.call`, but for Fenced."""
        response: pb.CopyResponse = await self._ask_writer("Copy", request, timeout_seconds)
        return response

    async def drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """Empty a node that is about to leave. Raises as `Channel.call`, but for Fenced."""
        seconds = request.timeout_seconds + self._deadline_seconds
        response: pb.DrainResponse = await self._ask_writer("Drain", request, seconds)
        return response

    async def undrain(self, request: pb.UndrainRequest) -> None:
        """Place on a drained node again. Raises as `Channel.call`, but for Fenced."""
        await self._ask_writer("Undrain", request, self._deadline_seconds)

    async def order_pool(self, request: pb.OrderPoolRequest) -> pb.OrderPoolResponse:
        """Have a node keep a prefix, or let go of it. Raises as `Channel.call`, but for Fenced."""
        seconds = request.timeout_seconds + self._deadline_seconds
        response: pb.OrderPoolResponse = await self._ask_writer("OrderPool", request, seconds)
        return response

    async def set_role(self, request: pb.SetRoleRequest) -> pb.SetRoleResponse:
        """Give a node's instances another role. Raises as `Channel.call`, but for Fenced."""
        seconds = request.timeout_seconds + self._deadline_seconds
        response: pb.SetRoleResponse = await self._ask_writer("SetRole", request, seconds)
        return response

    async def _ask_writer(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """Ask one manager after the other, and where it sends us. What one may have begun is asked again: doing it
        twice is doing it once. Where the time has run out nobody else is asked."""
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout_seconds
        failure = ManagerUnreachable("no manager is configured")
        for channel in (*self._channels[self._preferred :], *self._channels[: self._preferred]):
            left = ends - clock()
            if left < _LEAST_SECONDS:
                break
            try:
                return await self._follow(channel, method, request, timeout_seconds=left)
            except ManagerUnreachable as error:
                failure = error
        raise failure

    async def _follow(self, channel: Channel, method: str, request: Any, *, timeout_seconds: float) -> Any:
        """Ask a manager, and the one that it names as the cluster's writer."""
        try:
            return await channel.call(method, request, timeout_seconds=timeout_seconds)
        except Fenced as error:
            writer = next((channel for channel in self._channels if channel.address == error.writer), None)
            if writer is None:
                raise ManagerUnreachable(f"the cluster's writer, {error.writer}, is none of ours") from error
        try:
            return await writer.call(method, request, timeout_seconds=timeout_seconds)
        except Fenced as error:  # the writer changes just now
            raise ManagerUnreachable(f"{writer.address} is not the cluster's writer any more") from error

    async def _ask(self, kind: QuestionKind, request: Any) -> Any:
        return await self._of_any(
            lambda place, seconds: self._questions[place].ask(kind, request, timeout_seconds=seconds)
        )

    async def _call(self, method: str, request: Any) -> Any:
        return await self._of_any(
            lambda place, seconds: self._channels[place].call(method, request, timeout_seconds=seconds)
        )

    async def _of_any(self, call: Callable[[int, float], Awaitable[Any]]) -> Any:
        """The answer of the first manager that gives one; `call` is of a place in the list and the seconds it has."""
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds
        share = self._deadline_seconds / len(self._channels)
        failure = ManagerUnreachable("no manager is configured")
        for attempt in range(len(self._channels)):
            place = (self._preferred + attempt) % len(self._channels)
            left = deadline - asyncio.get_running_loop().time()
            last = attempt == len(self._channels) - 1
            try:
                response = await call(place, max(0.01, left if last else min(share, left)))
            except ManagerUnreachable as error:
                failure = error
                continue
            self._preferred = place
            return response
        raise failure

    async def watch_state(self) -> AsyncGenerator[pb.StateSnapshot, None]:
        """Snapshots for ever: at once, at every change and at least each second; another manager when one goes silent.

        A pause of more than a second means that no manager answers: judge by the time since the last snapshot. Why one does
        not is logged once.
        """
        attempt, logged = 0, set[str]()
        while True:
            channel = self._channels[attempt % len(self._channels)]
            try:
                async for snapshot in _snapshots(channel, pb.WatchStateRequest()):
                    logged.clear()
                    yield snapshot
            except (ManagerUnreachable, TimeoutError) as error:
                why = str(error) or f"manager {channel.address}: no word for {_SILENCE_SECONDS:g} s"
                if why not in logged:
                    _log.warning("manager.lost", error=why)
                logged.add(why)
            attempt += 1
            await asyncio.sleep(_RETRY_SECONDS)

    async def close(self) -> None:
        for questions in self._questions:
            await questions.close()
        for channel in self._channels:
            await channel.close()


async def _snapshots(channel: Channel, request: pb.WatchStateRequest) -> AsyncGenerator[pb.StateSnapshot, None]:
    """Raises ManagerUnreachable when they end with an error, TimeoutError when none comes."""
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

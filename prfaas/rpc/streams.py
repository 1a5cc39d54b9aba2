"""Many questions to one manager on one stream: each costs a third of what a call of its own costs, or less.

What is asked while a message is on its way goes into the next one, once the manager has said that it takes several. The
stream is opened with the first question and, after it broke, with the next one. Whoever asks waits for his own reply
alone; when the stream breaks, all that wait hear of it. A manager that does not offer streams is asked call by call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import grpc

from prfaas import tracing
from prfaas.errors import IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks

QuestionKind = Literal["match", "route"]
_METHODS: dict[QuestionKind, str] = {"match": "Match", "route": "Route"}
BATCHES_KEY = "prfaas-takes-batches"  # of the stream's initial metadata: its messages may hold several questions
_MAX_BATCH = 64  # questions
_MAX_BATCH_BYTES = 1 << 20  # reached by one prompt of a million tokens
FAILED = "failed"  # the reason of a reply in the place of one that the manager could not make
_LOOK_SECONDS = 5.0  # between looks at whether the channel has newer certificates than the stream


class _Unsent(NamedTuple):
    """A question that no message holds yet."""

    number: int
    kind: QuestionKind
    request: Any
    traceparent: str

    def write(self, message: pb.Question) -> None:
        message.id, message.traceparent = self.number, self.traceparent
        getattr(message, self.kind).CopyFrom(self.request)


class QuestionStream:
    """Asks the manager of one channel. Belongs to one event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._are_offered = True  # the manager has streams, as far as is known
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}
        self._unsent: dict[int, _Unsent] = {}
        self._takes_batches = False
        self._fresh = asyncio.Event()
        self._num_asked = 0
        self._num_streams = 0  # that have ended
        self._session: asyncio.Task[None] | None = None

    async def ask(self, kind: QuestionKind, request: Any, *, timeout_seconds: float) -> Any:
        """The response. Raises as `Channel.call`."""
        if self._are_offered:
            try:
                return await self._ask(kind, request, timeout_seconds)
            except ManagerUnreachable:
                if self._are_offered:
                    raise
        return await self._channel.call(_METHODS[kind], request, timeout_seconds=timeout_seconds)

    async def _ask(self, kind: QuestionKind, request: Any, timeout_seconds: float) -> Any:
        if self._session is None or self._session.done():
            self._session = asyncio.create_task(self._run(), name=f"questions to {self._channel.address}")
        self._num_asked += 1
        number, future = self._num_asked, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._unsent[number] = _Unsent(number, kind, request, tracing.headers().get(tracing.HEADER, ""))
        self._fresh.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                reply = await future
        except TimeoutError as error:
            raise ManagerUnreachable(f"manager {self._channel.address}: no answer in time") from error
        finally:
            self._waiting.pop(number, None)
            self._unsent.pop(number, None)
        if reply.HasField("refusal") and reply.refusal.reason == FAILED:
            raise ManagerUnreachable(f"manager {self._channel.address} failed to answer: {reply.refusal.message}")
        if reply.HasField("refusal"):
            raise IndexRefusal(reply.refusal.reason, reply.refusal.message)
        return getattr(reply, kind)

    async def _run(self) -> None:
        """Stream after stream, as long as there is something to ask."""
        failure: PrfaasError = ManagerUnreachable(f"manager {self._channel.address}: the stream was closed")
        try:
            with self._channel.translated_errors():
                while True:
                    await self._stream()
        except PrfaasError as error:
            failure = error
        finally:
            self._fail(failure)

    async def _stream(self) -> None:
        self._takes_batches = False
        call = self._channel.stream("Ask", self._questions())
        try:
            async for reply in call:
                if not self._takes_batches:
                    self._takes_batches = BATCHES_KEY in dict(await call.initial_metadata())
                for its in (reply, *reply.further):
                    self._take(its)
        except grpc.aio.AioRpcError as error:
            self._are_offered = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            raise
        finally:
            self._num_streams += 1
        if self._waiting.keys() - self._unsent.keys():
            raise ManagerUnreachable(f"manager {self._channel.address} ended the stream of replies")

    def _take(self, reply: pb.Reply) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _questions(self) -> AsyncIterator[pb.Question]:
        """What is asked, until the channel has other certificates than the stream began with."""
        connection, number = self._channel.connection, self._num_streams
        while (
            self._num_streams == number and self._channel.connection is connection
        ):  # gRPC lets an ended stream's wait on
            if self._unsent:
                yield self._next_message()
            else:
                self._fresh.clear()
                await self._wait()

    def _next_message(self) -> pb.Question:
        """What was asked first, and as much of the rest as a message may hold; none of it is unsent from here on."""
        message, num_bytes = pb.Question(), 0
        for number in list(islice(self._unsent, _MAX_BATCH if self._takes_batches else 1)):
            its = self._unsent[number]
            num_bytes += its.request.ByteSize()
            if message.id and num_bytes > _MAX_BATCH_BYTES:
                break
            its.write(message.further.add() if message.id else message)
            del self._unsent[number]
        return message

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._fresh.wait()
        except TimeoutError:
            pass

    def _fail(self, failure: PrfaasError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)

    async def close(self) -> None:
        if self._session is not None:
            await cancel_tasks((self._session,))

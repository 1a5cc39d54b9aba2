"""Stream of queries to one manager. A query on it costs a third of a separate call, or less.

Queries that arrive while a message is on its way share the next message. The stream
opens with the first query, and again after a failure. Each caller waits for its own reply only; if the stream breaks,
all waiting callers get the error.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, Literal, NamedTuple

from prfaas import tracing
from prfaas.errors import IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks

QuestionKind = Literal["match", "route"]
BATCHES_KEY = "prfaas-takes-batches"  # Initial metadata that routers of version 0.1.0 look for.
_MAX_BATCH = 64  # Queries per message.
_MAX_BATCH_BYTES = 1 << 20  # One prompt of a million tokens has as many.
FAILED = "failed"  # Reason of a reply if the manager failed to make one.
_LOOK_SECONDS = 5.0  # Period of checks for newer certificates.


class _Unsent(NamedTuple):
    """Query that is not in a message yet."""

    number: int
    kind: QuestionKind
    request: Any
    traceparent: str

    def write(self, message: pb.Question) -> None:
        message.id, message.traceparent = self.number, self.traceparent
        getattr(message, self.kind).CopyFrom(self.request)


class QuestionStream:
    """Queries to the manager of one channel. Belongs to one event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}
        self._unsent: dict[int, _Unsent] = {}
        self._fresh = asyncio.Event()
        self._num_asked = 0
        self._num_streams = 0  # Streams that have ended.
        self._session: asyncio.Task[None] | None = None

    async def ask(self, kind: QuestionKind, request: Any, *, timeout_seconds: float) -> Any:
        """Return the response. Raises as `Channel.call`."""
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
        """Run stream after stream until one fails."""
        failure: PrfaasError = ManagerUnreachable(f"manager {self._channel.address}: the stream was closed")
        try:
            with self._channel.translated_errors():
                while True:
                    await self._stream()
        except PrfaasError as error:
            failure = error
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(failure)

    async def _stream(self) -> None:
        call = self._channel.stream("Ask", self._messages())
        try:
            async for reply in call:
                for part in (reply, *reply.further):
                    self._take(part)
        finally:
            self._num_streams += 1
        if self._waiting.keys() - self._unsent.keys():
            raise ManagerUnreachable(f"manager {self._channel.address} ended the stream of replies")

    def _take(self, reply: pb.Reply) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _messages(self) -> AsyncIterator[pb.Question]:
        """Yield messages until the stream ends or the channel has other certificates."""
        connection, number = self._channel.connection, self._num_streams
        while self._num_streams == number and self._channel.connection is connection:
            if self._unsent:
                yield self._next_message()
            else:
                self._fresh.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._fresh.wait()

    def _next_message(self) -> pb.Question:
        """Return the oldest query with as many further ones as a message may hold, and mark them as sent."""
        message, num_bytes = pb.Question(), 0
        for number in list(islice(self._unsent, _MAX_BATCH)):
            query = self._unsent[number]
            num_bytes += query.request.ByteSize()
            if message.id and num_bytes > _MAX_BATCH_BYTES:
                break
            query.write(message.further.add() if message.id else message)
            del self._unsent[number]
        return message

    async def close(self) -> None:
        if self._session is not None:
            await cancel_tasks((self._session,))

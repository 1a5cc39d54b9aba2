"""A link between two datacenters on one machine: a TCP relay with delay and rate, that can be cut or made to corrupt.

It needs no privileges, and what it does to a byte it does on the way, as a real link would. It is for showing and
testing behaviour, not for measuring speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

READ_BYTES = 1 << 16
RECEIVE_BUFFER_BYTES = 128 << 10  # of each connection: what cannot go on waits in the sender, as on any link


@dataclass(frozen=True)
class LinkShape:
    """One-way delay and the rate of each direction, zero is none; and how much it takes before it has delivered it."""

    delay_seconds: float = 0.0
    bytes_per_second: float = 0.0
    max_queued_pieces: int = 64  # 4 MiB in flight per direction and connection


Filter = Callable[[bytes], bytes]


class Relay:
    """Listens on loopback and passes every connection on to `target`, from a thread of its own."""

    def __init__(self, target: str, shape: LinkShape = LinkShape()) -> None:
        self.target = target
        self._shape = shape
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._cut_after_bytes: int | None = None
        self._new_filter: Callable[[], Filter] | None = None
        self._back_filter: Filter | None = None
        self.is_cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._hold_after_bytes: int | None = None
        self._dropping: asyncio.Future[None] | None = None
        self._free_at = {True: 0.0, False: 0.0}  # towards the target, and back
        self.address = ""
        self.forwarded_bytes = 0  # towards the target
        self.num_accepted = 0  # connections, of which some may have ended

    def __enter__(self) -> Relay:
        self._thread.start()
        self.address = self._run(self._listen())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _listen(self) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # its connections inherit it
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=READ_BYTES)
        host, port = listening.getsockname()
        return f"{host}:{port}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for _ in range(
            5
        ):  # connections accepted just before show up, and aborted ones close, in the loop's next rounds
            await self._drop_all()
            await asyncio.sleep(0)

    async def _drop_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_after(self, num_bytes: int) -> None:
        """Cut the link when that many more bytes have gone to the target; it stays cut until `mend`."""
        self._cut_after_bytes = self.forwarded_bytes + num_bytes

    def hold(self) -> None:
        """Let nothing through from here on, and keep every connection, until `release`."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def hold_after(self, num_bytes: int) -> None:
        """Do so before more than that many more bytes have gone to the target; `is_held` says when."""
        self._hold_after_bytes = self.forwarded_bytes + num_bytes

    @property
    def is_held(self) -> bool:
        """Whether nothing gets through, with every connection kept."""
        return not self._flows.is_set()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    @property
    def num_connections(self) -> int:
        """That somebody has made to this relay and that it has not ended, with what it still has to deliver."""
        return len(self._tasks)

    def drop_one(self) -> None:
        """Cut one connection; the others go on."""
        self._run(self._drop_first())

    async def _drop_first(self) -> None:
        for task in list(self._tasks)[:1]:
            task.cancel()

    def reshape(self, shape: LinkShape) -> None:
        """What passes from here on has this delay and rate."""
        self._shape = shape

    def mend(self) -> None:
        """Carry again what comes; where no link was cut it will not be."""
        self._run(self._mend())

    async def _mend(self) -> None:
        self._cut_after_bytes = None
        self.is_cut = False

    def filter(self, new_filter: Callable[[], Filter] | None, *, back: Filter | None = None) -> None:
        """Every connection made from here on passes its bytes to the target through a filter of its own, and those that
        come back through `back`."""
        self._new_filter, self._back_filter = new_filter, back
        self._run(self._drop_all())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_accepted += 1
        try:
            if not self.is_cut:
                await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
        change = self._new_filter() if self._new_filter else None
        there = asyncio.ensure_future(self._pump(reader, far_writer, change, counted=True))
        back = asyncio.ensure_future(self._pump(far_reader, writer, self._back_filter, counted=False))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()  # first: a second cancellation ends the wait below
            for pump in (there, back):
                pump.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Filter | None, *, counted: bool
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._shape.max_queued_pieces)
        delivery = asyncio.ensure_future(self._deliver(pieces, writer, counted=counted))
        try:
            while not delivery.done() and (data := await reader.read(READ_BYTES)):
                await pieces.put((time.monotonic() + self._shape.delay_seconds, change(data) if change else data))
            await pieces.put((0.0, b""))
            await delivery
        finally:
            delivery.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await delivery

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        while True:
            due, data = await pieces.get()
            if not data:
                return
            await asyncio.sleep(due - time.monotonic())
            await asyncio.sleep(self._turn(len(data), towards_target=counted) - time.monotonic())
            if counted and self._reaches_hold(len(data)):
                self._flows.clear()
            await self._flows.wait()
            if counted and self._reaches_cut(len(data)):
                return
            writer.write(data)
            await writer.drain()

    def _turn(self, num_bytes: int, *, towards_target: bool) -> float:
        """When so many bytes may go: all connections share the rate of their direction."""
        starts_at = max(self._free_at[towards_target], time.monotonic())
        if self._shape.bytes_per_second:
            self._free_at[towards_target] = starts_at + num_bytes / self._shape.bytes_per_second
        return starts_at

    def _reaches_hold(self, num_bytes: int) -> bool:
        if self._hold_after_bytes is None or self.forwarded_bytes + num_bytes <= self._hold_after_bytes:
            return False
        self._hold_after_bytes = None
        return True

    def _reaches_cut(self, num_bytes: int) -> bool:
        """Whether the link is cut before these bytes; then every connection goes."""
        if self._cut_after_bytes is not None and self.forwarded_bytes + num_bytes > self._cut_after_bytes:
            self.is_cut = True
            self._dropping = asyncio.ensure_future(self._drop_all())  # a task that nobody holds may vanish
            return True
        self.forwarded_bytes += num_bytes
        return False

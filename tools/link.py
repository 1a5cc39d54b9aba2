"""TCP relay that emulates a link between two datacenters: delay, rate, interruption and corruption.

It needs no privileges. Use it to show and test behaviour, not to measure speed.
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
RECEIVE_BUFFER_BYTES = 128 << 10  # Small enough for backpressure to reach the sender.


@dataclass(frozen=True)
class LinkShape:
    """One-way delay, rate per direction (0: unlimited), and the number of pieces in flight."""

    delay_seconds: float = 0.0
    bytes_per_second: float = 0.0
    max_queued_pieces: int = 64  # 4 MiB per direction and connection.


Filter = Callable[[bytes], bytes]


class Relay:
    """Relay that accepts connections on loopback and forwards them to `target`, in a thread of its own."""

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
        self._free_at = {True: 0.0, False: 0.0}  # True is the direction to the target.
        self.address = ""
        self.forwarded_bytes = 0  # Only those to the target count.
        self.num_accepted = 0  # Includes connections that have ended.

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
        # Accepted connections inherit the buffer size.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=READ_BYTES)
        host, port = listening.getsockname()
        return f"{host}:{port}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        # New connections appear and aborted connections close only in the next iterations of the loop.
        for _ in range(5):
            await self._drop_all()
            await asyncio.sleep(0)

    async def _drop_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_after(self, num_bytes: int) -> None:
        """Cut the link after `num_bytes` more bytes to the target. It stays cut until `restore`."""
        self._cut_after_bytes = self.forwarded_bytes + num_bytes

    def hold(self) -> None:
        """Stop forwarding but keep all connections, until `release`."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def hold_after(self, num_bytes: int) -> None:
        """Hold the link before more than `num_bytes` more bytes go to the target."""
        self._hold_after_bytes = self.forwarded_bytes + num_bytes

    @property
    def is_held(self) -> bool:
        """True while nothing is forwarded and all connections are kept."""
        return not self._flows.is_set()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    @property
    def num_connections(self) -> int:
        """Number of open connections, including those that still deliver data."""
        return len(self._tasks)

    def drop_connection(self) -> None:
        """Close one connection; the others continue."""
        self._run(self._drop_first())

    async def _drop_first(self) -> None:
        for task in list(self._tasks)[:1]:
            task.cancel()

    def reshape(self, shape: LinkShape) -> None:
        """Apply another delay and rate to everything that follows."""
        self._shape = shape

    def restore(self) -> None:
        """Accept connections again, and forget a cut that has not happened yet."""
        self._run(self._restore())

    async def _restore(self) -> None:
        self._cut_after_bytes = None
        self.is_cut = False

    def filter(self, new_filter: Callable[[], Filter] | None, *, back: Filter | None = None) -> None:
        """Close all connections. Later ones send through a filter of their own, and receive through `back`."""
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
        forward = asyncio.ensure_future(self._pump(reader, far_writer, change, counted=True))
        back = asyncio.ensure_future(self._pump(far_reader, writer, self._back_filter, counted=False))
        try:
            await asyncio.wait((forward, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()  # Abort first: a second cancellation ends the wait below.
            for pump in (forward, back):
                pump.cancel()
            await asyncio.gather(forward, back, return_exceptions=True)

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
        """Return when these bytes may leave. All connections share the rate of their direction."""
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
        """Count the bytes, or cut the link before them and return True."""
        if self._cut_after_bytes is not None and self.forwarded_bytes + num_bytes > self._cut_after_bytes:
            self.is_cut = True
            # The reference keeps the task from being collected.
            self._dropping = asyncio.ensure_future(self._drop_all())
            return True
        self.forwarded_bytes += num_bytes
        return False

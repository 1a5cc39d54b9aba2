"""Decode engine's end of the prefill worker: orders go out, and finished ones come back.

A worker that dies is replaced, and gets its orders again. A worker that is silent is killed, so that it writes no block when it
wakes. Orders are refused after too many deaths, since a prompt may be the cause, and while no worker starts.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from prfaas import logs
from prfaas.colocate.channel import Channel
from prfaas.colocate.cores import Cores, move_threads, spread_threads
from prfaas.colocate.messages import Cancel, Done, Ping, PrefillHello, Ready, UseCores
from prfaas.colocate.prefill_plan import Order

log = logs.get("colocate.prefill")

MAX_DEATHS = 3  # Of the workers that had one order.
PING_SECONDS, SILENCE_SECONDS = 0.5, 2.0  # A worker answers within milliseconds, also in the middle of a step.
START_SECONDS = 30.0  # A worker that starts for longer is given up.


class PrefillClient:
    """Orders of one decode engine. Runs on its scheduler's thread, which it never keeps waiting."""

    def __init__(self, hello: PrefillHello, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._hello = hello
        self._clock = clock
        self._orders: dict[str, Order] = {}
        self._deaths: Counter[str] = Counter()  # By order.
        self._refused: set[str] = set()
        self._cancelled: set[str] = set()  # Orders that the worker has, or is sent, a `Cancel` for.
        self._finished: set[str] = set()
        self._unsent: list[Any] = []
        self._cores: Cores = ()
        self._channel: Channel | None = None
        self._process = 0  # Worker that is ready; 0 while none is.
        self._lost_at = clock()  # Time since when none is ready.
        self._pinged_at = 0.0
        self._is_silent = False  # Since the last ping.
        self.num_deaths = 0
        self._start()

    @property
    def is_busy(self) -> bool:
        return bool(self._orders or self._refused or self._finished)

    def accepts_orders(self) -> bool:
        """Return whether a worker is ready, or should be soon."""
        if not self._process:
            self._receive()
        return bool(self._process) or self._clock() - self._lost_at <= SILENCE_SECONDS

    def add(self, order: Order) -> None:
        """Have an order computed. It goes out with the next `flush`."""
        self._orders[order.request_id] = order
        self._unsent.append(order)

    def cancel(self, request_id: str) -> None:
        """Stop an order. It ends up in `take_finished` once nothing writes its blocks any more."""
        if request_id not in self._orders or request_id in self._cancelled:
            return
        if self._process:
            self._cancelled.add(request_id)
            self._unsent.append(Cancel(request_id))
        else:
            self._finish(request_id)

    def flush(self, cores: Cores) -> None:
        """Send what is unsent, after the cores to use. What finds no room in the socket goes out later."""
        if cores != self._cores:
            self._cores = cores
            self._unsent = [UseCores(cores), *(item for item in self._unsent if not isinstance(item, UseCores))]
        if not self._process:
            self._receive()
        now = self._clock()
        if self._channel is None or not self._process:
            is_late = now - self._started_at > START_SECONDS
            if is_late and self._channel is not None:
                log.warning("prefill_worker.late", seconds=round(now - self._started_at, 1))
            if is_late or (self._orders and self._channel is None):
                self._start()
            return
        if self._orders and not self._is_silent and now - self._pinged_at > PING_SECONDS:
            self._is_silent, self._pinged_at = True, now
            self._unsent.append(Ping())
        try:
            while self._unsent and self._channel.has_room():
                self._channel.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            self._kill()
        except OSError:
            self._bury()

    def lend(self, cores: Cores, own: Cores, seconds: float) -> None:
        """Let the worker use `cores` for some seconds, at most until an order is finished, and only its own ones then."""
        with contextlib.suppress(OSError):  # The worker, or one of its threads, has ended.
            if self._process and seconds:
                spread_threads(cores, self._process)
                self._receive(seconds)
            if self._process:
                move_threads(own, self._process)

    def take_finished(self, timeout_seconds: float = 0.0) -> set[str]:
        """Return requests whose orders were computed or cancelled, waiting up to `timeout_seconds` for the first."""
        self._receive(timeout_seconds)
        self._end_silence()
        finished, self._finished = self._finished, set()
        return finished

    def take_refused(self) -> set[str]:
        """Return requests whose orders no worker will compute."""
        refused, self._refused = self._refused, set()
        return refused

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _start(self) -> None:
        """Have the fork server start a worker. Without a fork server, the supervisor restarts everything."""
        self.close()
        self._started_at = self._clock()
        try:
            self._channel = Channel.connect()
            self._channel.send(self._hello)
        except OSError:
            self.close()

    def _receive(self, timeout_seconds: float = 0.0) -> None:
        """Read all messages, waiting up to `timeout_seconds` for the first that finishes an order."""
        deadline = self._clock() + timeout_seconds
        try:
            while self._channel is not None:
                if not self._channel.has_message(0.0 if self._finished else max(0.0, deadline - self._clock())):
                    break
                message = self._channel.receive()
                self._is_silent = False
                if isinstance(message, Ready):
                    self._process = message.process
                    self._unsent = [UseCores(self._cores), *self._orders.values()]
                    self.flush(self._cores)
                elif isinstance(message, Done) and message.request_id in self._orders:
                    self._finish(message.request_id)
        except (EOFError, OSError):
            self._bury()

    def _end_silence(self) -> None:
        """Kill a worker that answers no ping. While no worker starts, refuse all orders: none has been sent."""
        if not self.accepts_orders():
            self._refuse(list(self._orders))
        elif self._process and self._is_silent and self._clock() - self._pinged_at > SILENCE_SECONDS:
            self._kill()

    def _kill(self) -> None:
        """Kill a silent worker. It may still have orders until the channel closes."""
        log.warning("prefill_worker.silent", process=self._process)
        os.kill(self._process, signal.SIGKILL)

    def _bury(self) -> None:
        """Start a new worker after the death of the last one, which gets all orders.

        The channel closes after the last thread of the dead process, so nothing writes its blocks any more. After a worker
        that did not even start, the next one waits for an order.
        """
        self.num_deaths += 1
        self._deaths.update(self._orders.keys())
        for request_id in self._cancelled.copy():
            self._finish(request_id)
        self._refuse([name for name in self._orders if self._deaths[name] >= MAX_DEATHS])
        if self._process:
            self._process, self._lost_at = 0, self._clock()
            self._start()
        else:
            self.close()
        log.warning("prefill_worker.lost", orders=len(self._orders), refused=sorted(self._refused))

    def _refuse(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            self._refused.add(request_id)

    def _finish(self, request_id: str) -> None:
        self._forget(request_id)
        self._finished.add(request_id)

    def _forget(self, request_id: str) -> None:
        del self._orders[request_id]
        self._cancelled.discard(request_id)
        self._deaths.pop(request_id, None)

"""Decode engine's end of the prefill worker: orders go out, and finished ones come back.

A worker that dies is replaced, and gets its orders again. An order that has seen too many deaths is refused, since its prompt
may be their cause.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from prfaas import logs
from prfaas.colocate.channel import Channel
from prfaas.colocate.cores import Cores
from prfaas.colocate.messages import Cancel, Done, PrefillHello, Ready, UseCores
from prfaas.colocate.prefill_plan import Order

log = logs.get("colocate.prefill")

MAX_DEATHS = 3  # Of the workers that had one order.


class PrefillClient:
    """Orders of one decode engine. Runs on its scheduler's thread."""

    def __init__(self, hello: PrefillHello) -> None:
        self._hello = hello
        self._orders: dict[str, Order] = {}
        self._deaths: Counter[str] = Counter()  # By order.
        self._refused: set[str] = set()
        self._ended: set[str] = set()  # Cancelled orders of a dead worker.
        self._cancelled: set[str] = set()
        self._unsent: list[Any] = []
        self._cores: Cores = ()
        self._is_ready = False
        self.num_deaths = 0
        self._channel: Channel | None = self._connect()

    @property
    def is_busy(self) -> bool:
        return bool(self._orders or self._refused)

    def add(self, order: Order) -> None:
        """Have an order computed. It goes out with the next `flush`."""
        self._orders[order.request_id] = order
        self._unsent.append(order)

    def cancel(self, request_id: str) -> None:
        """Stop an order. It ends up in `take_finished` once nothing writes its blocks any more."""
        if request_id in self._orders and request_id not in self._cancelled:
            self._cancelled.add(request_id)
            self._unsent.append(Cancel(request_id))

    def flush(self, cores: Cores) -> None:
        """Send what is unsent, after the cores to use."""
        if cores != self._cores:
            self._cores = cores
            self._unsent.insert(0, UseCores(cores))
        if self._channel is None and self._orders:
            self._channel = self._connect()
        if self._channel is None or not self._is_ready:
            return  # While the worker starts, a full socket would block the engine.
        try:
            for message in self._unsent:
                self._channel.send(message)
        except OSError:
            self._bury(self._channel)
        else:
            self._unsent.clear()

    def take_finished(self, timeout_seconds: float = 0.0) -> set[str]:
        """Return requests whose orders were computed or cancelled, waiting up to `timeout_seconds` for the first."""
        finished: set[str] = set()
        try:
            while self._channel is not None and self._channel.has_message(0.0 if finished else timeout_seconds):
                message = self._channel.receive()
                if isinstance(message, Ready):
                    self._is_ready = True
                    self.flush(self._cores)
                elif isinstance(message, Done) and message.request_id in self._orders:
                    self._forget(message.request_id)
                    finished.add(message.request_id)
        except (EOFError, OSError):
            assert self._channel is not None
            self._bury(self._channel)
        finished |= self._ended
        self._ended.clear()
        return finished

    def take_refused(self) -> set[str]:
        """Return requests whose orders no worker will compute."""
        refused, self._refused = self._refused, set()
        return refused

    def _forget(self, request_id: str) -> None:
        del self._orders[request_id]
        self._cancelled.discard(request_id)
        self._deaths.pop(request_id, None)

    def _connect(self) -> Channel:
        channel = Channel.connect()
        channel.send(self._hello)
        return channel

    def _bury(self, channel: Channel) -> None:
        """Start a new worker after the death of the last one, and order again.

        The channel closes after the last thread of the dead process, so nothing writes its blocks any more. After a worker
        that did not even start, the next one waits for an order.
        """
        channel.close()
        self.num_deaths += 1
        self._deaths.update(self._orders.keys())
        for request_id in self._cancelled.copy():
            self._forget(request_id)
            self._ended.add(request_id)
        for request_id in [name for name in self._orders if self._deaths[name] >= MAX_DEATHS]:
            self._forget(request_id)
            self._refused.add(request_id)
        self._unsent = [UseCores(self._cores), *self._orders.values()]
        self._channel = self._connect() if self._is_ready else None
        self._is_ready = False
        log.warning("prefill_worker.lost", orders=len(self._orders), refused=sorted(self._refused))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

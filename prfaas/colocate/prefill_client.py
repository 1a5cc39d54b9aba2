"""Decode engine's end of the prefill worker: orders go out, and finished ones come back. A worker that dies is replaced."""

from __future__ import annotations

from typing import Any

from prfaas import logs
from prfaas.colocate.channel import Channel
from prfaas.colocate.cores import Cores
from prfaas.colocate.messages import Cancel, Done, PrefillHello, Ready, UseCores
from prfaas.colocate.prefill_plan import Order

log = logs.get("colocate.prefill")


class PrefillClient:
    """Orders of one decode engine. Runs on its scheduler's thread."""

    def __init__(self, hello: PrefillHello) -> None:
        self._hello = hello
        self._orders: dict[str, Order] = {}
        self._cancelled: set[str] = set()
        self._unsent: list[Any] = []
        self._cores: Cores = ()
        self._is_ready = False
        self.num_restarts = 0
        self._channel = self._connect()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._orders

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

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
        if not self._is_ready:
            return  # The worker still starts, and a full socket would block the engine.
        try:
            for message in self._unsent:
                self._channel.send(message)
        except OSError:
            self._replace()
        else:
            self._unsent.clear()

    def take_finished(self, timeout_seconds: float = 0.0) -> set[str]:
        """Return requests whose orders ended, waiting up to `timeout_seconds` for the first."""
        finished: set[str] = set()
        try:
            while self._channel.has_message(0.0 if finished else timeout_seconds):
                message = self._channel.receive()
                if isinstance(message, Ready):
                    self._is_ready = True
                    self.flush(self._cores)
                elif isinstance(message, Done) and message.request_id in self._orders:
                    del self._orders[message.request_id]
                    self._cancelled.discard(message.request_id)
                    finished.add(message.request_id)
        except (EOFError, OSError):
            finished |= self._replace()
        return finished

    def _connect(self) -> Channel:
        channel = Channel.connect()
        channel.send(self._hello)
        return channel

    def _replace(self) -> set[str]:
        """Start a new worker after the death of the last one, and order again; return the cancelled requests.

        The channel closes after the last thread of the dead process, so nothing writes its blocks any more.
        """
        self.num_restarts += 1
        self._channel.close()
        cancelled, self._cancelled = self._cancelled, set()
        for request_id in cancelled:
            del self._orders[request_id]
        self._is_ready = False
        self._unsent = [UseCores(self._cores), *self._orders.values()]
        self._channel = self._connect()
        log.warning("prefill.restarted", orders=len(self._orders))
        return cancelled

    def close(self) -> None:
        self._channel.close()

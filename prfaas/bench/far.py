"""The receiving host of a link measurement: takes in what comes over the wire, checks it, and throws it away."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from prfaas.bench import memory
from prfaas.transport.receiver.api import Accepted, OpenRequest, ReceiveCompleted, ReceiveEvent, ReceiveFailed, Rejected
from prfaas.transport.receiver.server import Receiver, ReceiverConfig

NAME = "bench-far"
MAX_OBJECTS = 4096  # far more layers than any model has


class BenchReceiver:
    """Accepts transfers into memory that all of them share, since nobody reads it."""

    def __init__(
        self,
        config: ReceiverConfig,
        *,
        key: bytes,
        memory_bytes: int,
        say: Callable[[str], None],
        name: str = NAME,
    ) -> None:
        """`say` gets one line per transfer, from any thread; `name` is that of the certificate, if there is one.

        Raises:
            ConfigError: this host has not so much memory.
        """
        self._say = say
        self._memory = memory.take(memory_bytes, flag="--memory")
        self._memory[:: mmap.PAGESIZE] = bytes(len(range(0, memory_bytes, mmap.PAGESIZE)))  # no page fault is measured
        self._sizes: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._receiver = Receiver(config, local_name=name, key=key, accept=self._accept, on_event=self._on_event)

    def start(self) -> str:
        """Listen; returns the bound "host:port".

        Raises:
            ConfigError: the address is taken, or public without `insecure_plaintext`.
        """
        return self._receiver.start()

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were refused or ended for what they sent, by reason."""
        return self._receiver.refused

    def close(self) -> None:
        """Stop listening."""
        self._receiver.close()

    def _accept(self, request: OpenRequest, reply: Callable[[Accepted | Rejected], None]) -> None:
        if len(request.object_bytes) > MAX_OBJECTS:
            reply(Rejected("protocol", f"more than {MAX_OBJECTS} layers"))
            return
        sizes = list(request.object_bytes)
        if max(sizes, default=0) > len(self._memory):
            reply(Rejected("no_memory", f"a layer of {max(sizes)} bytes; start the far end with more --memory"))
            return
        places = self._places(sizes)
        with self._lock:
            self._sizes[request.transfer_id] = sum(sizes)
        reply(Accepted(held=(), destination=places.__getitem__))

    def _places(self, sizes: list[int]) -> list[memoryview]:
        """Memory for each layer, over and over the same."""
        at, places = 0, []
        for size in sizes:
            at = 0 if at + size > len(self._memory) else at
            places.append(self._memory[at : at + size])
            at += size
        return places

    def _on_event(self, event: ReceiveEvent) -> None:
        if not isinstance(event, ReceiveCompleted | ReceiveFailed):
            return
        with self._lock:
            num_bytes = self._sizes.pop(event.transfer_id, 0)
        if isinstance(event, ReceiveFailed):
            self._say(f"failed: {event.reason}: {event.message}")
        else:
            self._say(f"received {num_bytes / 1e6:.1f} MB, {event.stats.checksum_failures} chunks came changed")

"""Both hosts of a link measurement: one sends a prompt's layers, the other checks and discards them.

The layers are random bytes, so connections are authenticated but never encrypted.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.errors import RemoteProtocolError
from prfaas.transport.receiver.api import (
    Acceptance,
    Decision,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    Rejection,
)
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import (
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
    SendRequest,
)
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.transport.sender.stats import LinkStats

SENDER_NAME, RECEIVER_NAME = "bench-near", "bench-far"
DEADLINE_SECONDS = 3600.0
PROGRESS_SECONDS = 0.2
MEMORY_BYTES = 256 << 20  # Larger than caches of processors; layers overlap in it.
MAX_LAYER_BYTES = 8 << 30
PATTERN_BYTES = 1 << 20

Progress = Callable[[int, LinkStats], None]  # Called with the number of bytes that have arrived.


class BenchReceiver:
    """Receiving host. All transfers share one piece of memory, since nobody reads it."""

    def __init__(self, address: str, *, key: bytes, report: Callable[[str], None]) -> None:
        """`report` gets one line per transfer, from any thread."""
        self._report = report
        self._memory = _memory(MEMORY_BYTES)
        self._sizes: dict[bytes, int] = {}
        self._lock = threading.Lock()
        config = ReceiverConfig(address, insecure_plaintext=True)
        self._receiver = Receiver(
            config, local_name=RECEIVER_NAME, key=key, accept=self._accept, on_event=self._on_event
        )
        self.start, self.close = self._receiver.start, self._receiver.close

    @property
    def refused(self) -> dict[str, int]:
        """Number of connections that were refused or ended for what they sent, by reason."""
        return self._receiver.refused

    def _accept(self, request: OpenRequest, reply: Callable[[Decision], None]) -> None:
        sizes = list(request.object_bytes)
        largest = max(sizes, default=0)
        if largest > MAX_LAYER_BYTES:
            reply(Rejection("no_memory", f"a layer of {largest} bytes; at most {MAX_LAYER_BYTES} are accepted"))
            return
        if largest > len(self._memory):
            self._memory = _memory(largest)
        views = _overlapping(self._memory, sizes)
        with self._lock:
            self._sizes[request.transfer_id] = sum(sizes)
        reply(Acceptance(held=(), destination=views.__getitem__))

    def _on_event(self, event: ReceiveEvent) -> None:
        if not isinstance(event, ReceiveCompleted | ReceiveFailed):
            return
        with self._lock:
            num_bytes = self._sizes.pop(event.transfer_id, 0)
        if isinstance(event, ReceiveFailed):
            self._report(f"failed: {event.reason}: {event.message}")
        else:
            self._report(f"received {num_bytes / 1e6:.1f} MB, {event.stats.checksum_failures} corrupt chunks")


@dataclass(frozen=True)
class TransferRun:
    """One transfer by the sender's clock, less half the smallest round trip, which confirmations take."""

    num_bytes: int
    seconds: float  # From the first ready layer to the arrival of the last byte.
    first_seconds: float  # From the first ready layer to the arrival of the first chunk.
    exposed_seconds: float  # From the last ready layer to the arrival of the last byte.
    cpu_seconds: float  # Of this process, in user and kernel mode.
    checksum_failures: int
    link: LinkStats

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds


class BenchSender:
    """Sending host: a link over which transfers run one after another."""

    def __init__(self, address: str, *, key: bytes, layer_bytes: Sequence[int]) -> None:
        self._layers = _overlapping(_memory(max(MEMORY_BYTES, *layer_bytes)), layer_bytes)
        self._watch = _TransferWatch()
        self._link = Link(
            address,
            config=LinkConfig(insecure_plaintext=True),
            local_name=SENDER_NAME,
            peer_name=RECEIVER_NAME,
            key=key,
            on_event=lambda event: self._watch.on_event(event),
        )

    def close(self) -> None:
        """End the link."""
        self._link.close()

    def run(self, *, pause_seconds: float, progress: Progress) -> TransferRun:
        """Send every layer, one after each pause, or all at once.

        Raises:
            RemoteProtocolError: the receiver refused, or went away.
        """
        watch = self._watch = _TransferWatch()
        transfer_id, sizes = os.urandom(16), [len(layer) for layer in self._layers]
        self._link.open(SendRequest(transfer_id, b"", sizes, self._layers.__getitem__, 0, DEADLINE_SECONDS))
        self._wait(watch.accepted, DEADLINE_SECONDS, progress)
        cpu_seconds, began_at = _cpu_seconds(), time.monotonic()
        last_ready_at = self._release_layers(transfer_id, pause_seconds, progress)
        self._wait(watch.freed, DEADLINE_SECONDS, progress)
        cpu_seconds, stats = _cpu_seconds() - cpu_seconds, self._link.snapshot()
        return_seconds = stats.min_rtt_seconds / 2
        return TransferRun(
            num_bytes=sum(sizes),
            seconds=watch.ended_at - began_at - return_seconds,
            first_seconds=(watch.first_at or watch.ended_at) - began_at - return_seconds,
            exposed_seconds=watch.ended_at - last_ready_at - return_seconds,
            cpu_seconds=cpu_seconds,
            checksum_failures=watch.checksum_failures,
            link=stats,
        )

    def _release_layers(self, transfer_id: bytes, pause_seconds: float, progress: Progress) -> float:
        """Let one layer after the other leave, and return when the last was ready."""
        due_at = time.monotonic()
        for number, layer in enumerate(self._layers):
            due_at += pause_seconds
            if pause_seconds:
                self._wait(self._watch.freed, due_at - time.monotonic(), progress)
            self._link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=len(layer))
        return time.monotonic()

    def _wait(self, until: threading.Event, seconds: float, progress: Progress) -> None:
        """Wait for an event or until the time is over. Raises when the transfer has failed."""
        end = time.monotonic() + seconds
        while not until.wait(max(0.0, min(PROGRESS_SECONDS, end - time.monotonic()))) and time.monotonic() < end:
            progress(self._watch.acked_bytes, self._link.snapshot())
        if self._watch.failure is not None:
            raise self._watch.failure


class _TransferWatch:
    """Events of one transfer, and when they came."""

    def __init__(self) -> None:
        self.accepted = threading.Event()
        self.freed = threading.Event()
        self.acked_bytes = 0
        self.first_at = 0.0
        self.ended_at = 0.0
        self.checksum_failures = 0
        self.failure: RemoteProtocolError | None = None

    def on_event(self, event: SendEvent) -> None:
        now = time.monotonic()
        if isinstance(event, SendAccepted):
            self.accepted.set()
        elif isinstance(event, SendProgress):
            self.acked_bytes, self.first_at = event.acked_bytes, self.first_at or now
        elif isinstance(event, SendCompleted):
            self.ended_at, self.checksum_failures = now, event.stats.checksum_failures
        elif isinstance(event, SendFailed):
            self.failure = RemoteProtocolError(event.reason, event.message)
        elif isinstance(event, SendMemoryFree):
            self.freed.set()
            self.accepted.set()


def _memory(num_bytes: int) -> memoryview:
    """Return memory filled with bytes that do not repeat within a chunk, so that no page fault is measured later."""
    memory, pattern = memoryview(mmap.mmap(-1, num_bytes)), os.urandom(PATTERN_BYTES)
    for start in range(0, num_bytes, PATTERN_BYTES):
        part = memory[start : start + PATTERN_BYTES]
        part[:] = pattern[: len(part)]
    return memory


def _overlapping(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return a part of the memory for each layer. The parts overlap when the memory is used up."""
    start, views = 0, []
    for size in sizes:
        start = 0 if start + size > len(memory) else start
        views.append(memory[start : start + size])
        start += size
    return views


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

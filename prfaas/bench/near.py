"""The sending host of a link measurement: sends a prompt's layers, and times what the far end confirms."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.bench import memory
from prfaas.bench.far import NAME as FAR_NAME
from prfaas.errors import RemoteProtocolError
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

NAME = "bench-near"
DEADLINE_SECONDS = 3600.0
PROGRESS_SECONDS = 0.2
PATTERN_BYTES = 1 << 20

Progress = Callable[[int, LinkStats], None]  # hears how many bytes have arrived


@dataclass(frozen=True)
class TransferRun:
    """One transfer by this host's clock: half the smallest round trip is taken off what the far end confirmed."""

    num_bytes: int
    seconds: float  # from the first layer's being ready to the last byte's arrival
    first_seconds: float  # until the first chunk had arrived
    exposed_seconds: float  # from the last layer's being ready to the last byte's arrival
    cpu_seconds: float  # of this process, in user and kernel mode
    checksum_failures: int
    link: LinkStats

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds


class BenchSender:
    """A link to a far end, over which runs go one after another."""

    def __init__(
        self,
        address: str,
        *,
        config: LinkConfig,
        key: bytes,
        layer_bytes: Sequence[int],
        name: str = NAME,
        peer_name: str = FAR_NAME,
    ) -> None:
        """`name` is that of this side's certificate, `peer_name` that of the far end's, if there are any.

        Raises:
            ConfigError: this host has not so much memory.
        """
        self._layers = _layers(layer_bytes)
        self._watch = _Watch()
        self._link = Link(
            address, config=config, local_name=name, peer_name=peer_name, key=key, on_event=self._on_event
        )

    def close(self) -> None:
        """End the link."""
        self._link.close()

    def run(self, *, pause_seconds: float, progress: Progress) -> TransferRun:
        """Send every layer, one each `pause_seconds`, or all at once.

        Raises:
            RemoteProtocolError: the far end refused, or went.
        """
        watch = self._watch = _Watch()
        transfer_id, sizes = os.urandom(16), [len(layer) for layer in self._layers]
        self._link.open(SendRequest(transfer_id, b"", sizes, self._layers.__getitem__, 0, DEADLINE_SECONDS))
        self._wait(watch, watch.accepted, DEADLINE_SECONDS, progress)
        cpu, began = _cpu_seconds(), time.monotonic()
        last_ready = self._layers_ready(transfer_id, watch, pause_seconds, progress)
        self._wait(watch, watch.freed, DEADLINE_SECONDS, progress)
        cpu, state = _cpu_seconds() - cpu, self._link.snapshot()
        came_back = state.min_rtt_seconds / 2
        return TransferRun(
            num_bytes=sum(sizes),
            seconds=watch.ended_at - began - came_back,
            first_seconds=(watch.first_at or watch.ended_at) - began - came_back,
            exposed_seconds=watch.ended_at - last_ready - came_back,
            cpu_seconds=cpu,
            checksum_failures=watch.checksum_failures,
            link=state,
        )

    def _layers_ready(self, transfer_id: bytes, watch: _Watch, pause_seconds: float, progress: Progress) -> float:
        """Let one layer after the other leave; returns when the last was ready."""
        due = time.monotonic()
        for number, layer in enumerate(self._layers):
            due += pause_seconds
            if pause_seconds:
                self._wait(watch, watch.freed, due - time.monotonic(), progress)
            self._link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=len(layer))
        return time.monotonic()

    def _wait(self, watch: _Watch, until: threading.Event, seconds: float, progress: Progress) -> None:
        """Return when this has happened or `seconds` are over; raises when the transfer failed."""
        end = time.monotonic() + seconds
        while not until.wait(max(0.0, min(PROGRESS_SECONDS, end - time.monotonic()))) and time.monotonic() < end:
            progress(watch.acked_bytes, self._link.snapshot())
        if watch.failure is not None:
            raise watch.failure

    def _on_event(self, event: SendEvent) -> None:
        self._watch.hear(event)


class _Watch:
    """What the link has said of one transfer."""

    def __init__(self) -> None:
        self.accepted = threading.Event()
        self.freed = threading.Event()
        self.acked_bytes = 0
        self.first_at = 0.0
        self.ended_at = 0.0
        self.checksum_failures = 0
        self.failure: RemoteProtocolError | None = None

    def hear(self, event: SendEvent) -> None:
        """Take an event at the time at which it comes."""
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


def _layers(sizes: Sequence[int]) -> list[memoryview]:
    """Memory with these layers, filled with bytes that do not repeat within a chunk."""
    content = memory.take(sum(sizes), flag="--layers, --layer-bytes, or --tokens of a --model")
    pattern = os.urandom(PATTERN_BYTES)
    for at in range(0, len(content), PATTERN_BYTES):
        part = content[at : at + PATTERN_BYTES]
        part[:] = pattern[: len(part)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [content[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

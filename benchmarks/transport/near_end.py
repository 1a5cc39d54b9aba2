"""Sending end of a measurement: a process that reads requests as JSON lines, sends, and reports times."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy

from benchmarks.transport.far_end import KEY, certificates_of, cpu_seconds, digest_of
from prfaas.transport.sender.api import SendAccepted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.link import Link, LinkConfig

Content = Literal["noise", "bf16"]


def keys_and_values(num_bytes: int) -> bytes:
    """Return bf16 values like those of attention: normally distributed, with a scale for each of 128 channels."""
    source = numpy.random.default_rng(1)
    scales = numpy.exp(source.standard_normal(128))
    values = (source.standard_normal((num_bytes // 256, 128)) * scales).astype(numpy.float32)
    return bytes((values.view(numpy.uint32) >> 16).astype(numpy.uint16))


@dataclass
class _Transfer:
    objects: list[memoryview]
    accepted: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: str = ""


class NearEnd:
    """Link that sends one transfer after another, or several at once."""

    def __init__(self, address: str, config: LinkConfig, *, content: Content, pool_bytes: int) -> None:
        self._link = Link(address, config=config, local_name="near", peer_name="far", key=KEY, on_event=self._on_event)
        self._pool = memoryview(mmap.mmap(-1, pool_bytes))
        pattern = os.urandom(1 << 20) if content == "noise" else keys_and_values(1 << 20)
        for at in range(0, len(self._pool), len(pattern)):
            self._pool[at : at + len(pattern)] = pattern
        self._transfers: dict[bytes, _Transfer] = {}

    def open(self, sizes: list[int], *, priority: int = 0, tenant: str = "") -> bytes:
        """Open a transfer and wait until the far end has accepted it."""
        transfer_id = os.urandom(16)
        ends = list(itertools.accumulate(sizes))
        objects = [self._pool[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        # No transfer may equal the previous one.
        for item in objects:
            item[:16] = os.urandom(16)
        transfer = self._transfers[transfer_id] = _Transfer(objects)
        self._link.open(SendRequest(transfer_id, b"", sizes, objects.__getitem__, priority, 300.0, tenant=tenant))
        assert transfer.accepted.wait(30), "the far end does not answer"
        assert not transfer.failure, transfer.failure
        return transfer_id

    def layers(self, transfer_id: bytes, num_layers: int, *, pause_seconds: float = 0.0) -> int:
        """Mark one layer after another as ready. Returns the time of the last."""
        transfer = self._transfers[transfer_id]
        layer_bytes = len(transfer.objects[0]) // num_layers
        due = time.monotonic()
        for layer in range(num_layers):
            due += pause_seconds
            time.sleep(max(0.0, due - time.monotonic()))
            self._link.ready(
                transfer_id,
                first_object=0,
                num_objects=len(transfer.objects),
                offset_bytes=layer * layer_bytes,
                length_bytes=layer_bytes,
            )
        return time.monotonic_ns()

    def wait(self, transfer_id: bytes) -> None:
        """Wait until the transfer has ended."""
        assert self._transfers[transfer_id].ended.wait(300), "the transfer does not end"

    def result(self, transfer_id: bytes) -> dict[str, object]:
        """Return the outcome of an ended transfer."""
        transfer = self._transfers[transfer_id]
        return {
            "transfer": transfer_id.hex(),
            "failure": transfer.failure,
            "digest": digest_of(transfer.objects),
        }

    def _on_event(self, event: SendEvent) -> None:
        transfer = self._transfers[event.transfer_id]
        if isinstance(event, SendAccepted):
            transfer.accepted.set()
        elif isinstance(event, SendFailed):
            transfer.failure = f"{event.reason}: {event.message}"
            transfer.accepted.set()
        elif isinstance(event, SendMemoryFree):
            transfer.ended.set()

    def run(self) -> None:
        """Answer requests until the input ends."""
        for line in sys.stdin:
            question = json.loads(line)
            answer = getattr(self, question.pop("ask"))(**question)
            print(json.dumps(answer), flush=True)

    def measure(
        self, num_objects: int, object_bytes: int, num_layers: int, pause_seconds: float = 0.0
    ) -> dict[str, object]:
        """Measure a transfer whose layers become ready at once, or `pause_seconds` after each other."""
        transfer_id = self.open([object_bytes] * num_objects)
        cpu, began_ns = cpu_seconds(), time.monotonic_ns()
        last_ready_ns = self.layers(transfer_id, num_layers, pause_seconds=pause_seconds)
        return self._measured(transfer_id, began_ns=began_ns, last_ready_ns=last_ready_ns, cpu_before=cpu)

    def scheduled(self, sizes: list[int], at_seconds: list[float]) -> dict[str, object]:
        """Measure a transfer whose objects become ready at these times after its start."""
        transfer_id = self.open(sizes)
        cpu, began, began_ns = cpu_seconds(), time.monotonic(), time.monotonic_ns()
        for number, (size, at) in enumerate(zip(sizes, at_seconds, strict=True)):
            time.sleep(max(0.0, began + at - time.monotonic()))
            self._link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=size)
        last_ready_ns = time.monotonic_ns()
        return self._measured(transfer_id, began_ns=began_ns, last_ready_ns=last_ready_ns, cpu_before=cpu)

    def _measured(
        self, transfer_id: bytes, *, began_ns: int, last_ready_ns: int, cpu_before: float
    ) -> dict[str, object]:
        self.wait(transfer_id)
        # Read before the result is checked, which costs processor time too.
        cpu = cpu_seconds() - cpu_before
        state, result = asdict(self._link.snapshot()), self.result(transfer_id)
        return result | {"began_ns": began_ns, "last_ready_ns": last_ready_ns, "cpu_seconds": cpu, "link": state}

    def urgent(self, urgent_bytes: int, bulk_bytes: int, after_seconds: float) -> dict[str, object]:
        """Measure an urgent transfer on an idle link, and another beside two bulk transfers."""
        alone = self.measure(1, urgent_bytes, 1)
        bulks = [self.open([1 << 24] * (bulk_bytes >> 24), priority=1) for _ in range(2)]
        for bulk in bulks:
            self.layers(bulk, 1)
        time.sleep(after_seconds)
        beside = self.measure(1, urgent_bytes, 1)
        has_bulk = not all(self._transfers[bulk].ended.is_set() for bulk in bulks)
        for bulk in bulks:
            self.wait(bulk)
        ended = [self.result(bulk) for bulk in bulks]
        return {"alone": alone, "beside": beside, "bulk_was_under_way": has_bulk, "bulk": ended}

    def crowd(self, num_transfers: int, crowd_bytes: int, own_bytes: int, after_seconds: float) -> dict[str, object]:
        """Measure a tenant's transfer on an idle link, and another beside many transfers of another tenant."""
        self._seconds(own_bytes)
        alone_seconds = self._seconds(own_bytes)
        crowd = [self.open([1 << 20] * (crowd_bytes >> 20), tenant="crowd") for _ in range(num_transfers)]
        for transfer_id in crowd:
            self.layers(transfer_id, 1)
        time.sleep(after_seconds)
        beside_seconds = self._seconds(own_bytes)
        num_left = sum(not self._transfers[transfer_id].ended.is_set() for transfer_id in crowd)
        return {"alone_seconds": alone_seconds, "beside_seconds": beside_seconds, "num_left": num_left}

    def _seconds(self, num_bytes: int) -> float:
        """Return the time from opening a transfer to the far end's confirmation."""
        began = time.monotonic()
        transfer_id = self.open([1 << 20] * (num_bytes >> 20), tenant="own")
        self.layers(transfer_id, 1)
        self.wait(transfer_id)
        assert not self._transfers[transfer_id].failure, self._transfers[transfer_id].failure
        return time.monotonic() - began

    def health(self, seconds: float, idle_seconds: float) -> dict[str, object]:
        """Sample the link's health while it is idle, and then while it is full."""
        self.measure(1, 1 << 20, 1)
        # The link is still making its connections.
        time.sleep(1.0)
        cpu, began = cpu_seconds(), time.monotonic()
        # Agents report at this interval.
        idle = self._sampled(idle_seconds, every_seconds=1.0)
        cpu = (cpu_seconds() - cpu) / (time.monotonic() - began)
        for _ in range(8):
            self.layers(self.open([1 << 24] * 64, priority=1), 1)
        return {"idle": idle, "idle_cpu_ratio": cpu, "busy": self._sampled(seconds, every_seconds=0.05)}

    def _sampled(self, seconds: float, *, every_seconds: float) -> list[tuple[float, float, str | None]]:
        samples: list[tuple[float, float, str | None]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            state = self._link.snapshot()
            samples.append((time.monotonic(), state.achievable_bytes_per_second, state.congestion))
            time.sleep(every_seconds)
        return samples


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    what, size, certificates = settings.pop("content"), settings.pop("pool_bytes"), certificates_of(settings.pop("tls"))
    NearEnd(sys.argv[1], LinkConfig(certificates=certificates, **settings), content=what, pool_bytes=size).run()

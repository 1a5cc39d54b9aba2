"""Receiving end of a measurement: a process that receives into memory, checks it, and reports transfers as JSON."""

from __future__ import annotations

import json
import mmap
import queue
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.receiver.api import (
    Acceptance,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejection,
)
from prfaas.transport.receiver.server import Receiver, ReceiverConfig

KEY = b"benchmark key of thirty-two byte"


@dataclass
class _Transfer:
    memory: list[memoryview]
    cpu_seconds: float  # Processor time of this process at the start of the transfer.


class FarEnd:
    """Receiver that accepts every transfer. It reuses memory, so that page faults are not measured."""

    def __init__(
        self,
        *,
        congestion_control: str,
        certificates: Certificates | None,
        pool_bytes: int,
        silence_seconds: float,
    ) -> None:
        config = ReceiverConfig(
            "0.0.0.0:0",
            certificates=certificates,
            insecure_plaintext=True,
            congestion_control=congestion_control,
            silence_seconds=silence_seconds,
        )
        self._reports: queue.SimpleQueue[ReceiveEvent] = queue.SimpleQueue()
        self._receiver = Receiver(config, local_name="far", key=KEY, accept=self._accept, on_event=self._on_event)
        self._pool = memoryview(mmap.mmap(-1, pool_bytes))
        self._pool[:: mmap.PAGESIZE] = bytes(len(self._pool) // mmap.PAGESIZE)
        self._transfers: dict[bytes, _Transfer] = {}
        self._ended: dict[bytes, tuple[str, int]] = {}

    def run(self) -> None:
        _print(address=self._receiver.start())
        while True:
            self._report(self._reports.get())

    def _accept(self, request: OpenRequest, reply: Callable[[Acceptance | Rejection], None]) -> None:
        at, memory = 0, []
        for size in request.object_bytes:
            at = 0 if at + size > len(self._pool) else at
            memory.append(self._pool[at : at + size])
            at += size
        self._transfers[request.transfer_id] = _Transfer(memory, cpu_seconds())
        reply(Acceptance(held=(), destination=memory.__getitem__))

    def _on_event(self, event: ReceiveEvent) -> None:
        if isinstance(event, ReceiveMemoryFree):
            self._reports.put(event)
        else:
            reason = event.reason if isinstance(event, ReceiveFailed) else "completed"
            self._ended[event.transfer_id] = (reason, time.monotonic_ns())
            assert isinstance(event, ReceiveFailed | ReceiveCompleted)

    def _report(self, event: ReceiveEvent) -> None:
        transfer = self._transfers.pop(event.transfer_id)
        cpu = cpu_seconds() - transfer.cpu_seconds
        reason, ended_ns = self._ended.pop(event.transfer_id)
        digest = digest_of(transfer.memory)
        _print(transfer=event.transfer_id.hex(), reason=reason, ended_ns=ended_ns, digest=digest, cpu_seconds=cpu)


def certificates_of(files: list[str]) -> Certificates | None:
    """Load certificates from the paths of authority, certificate and key. No paths leave the link unencrypted."""
    return Certificates(CertificateFiles(*map(Path, files))) if files else None


def digest_of(objects: list[memoryview]) -> int:
    """Return a digest of all objects."""
    state = xxhash.xxh3_64()
    for item in objects:
        state.update(item)
    return state.intdigest()


def cpu_seconds() -> float:
    """Return the processor time of this process, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _print(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    FarEnd(
        congestion_control=settings["congestion_control"],
        certificates=certificates_of(settings["tls"]),
        pool_bytes=settings["pool_bytes"],
        silence_seconds=settings["silence_seconds"],
    ).run()

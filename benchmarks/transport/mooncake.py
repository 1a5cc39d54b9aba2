"""Mooncake's transfer engine over TCP on an emulated link: `pip install --no-deps mooncake-transfer-engine-non-cuda`.

Debian: libibverbs1, libnuma1, librdmacm1. The receiving end is told nothing of a write's end, so it looks for a mark at the
end of each object; that look-out costs it a few percent of a core, which is in the figures.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.transport.far_end import cpu_seconds, digest_of
from tools.wan import FAR, NEAR, Wan

POOL_BYTES = 1 << 30
MARK_BYTES = 8
LOOK_SECONDS = 0.0005
LANES = {"default": "4", "most": "16"}


@dataclass(frozen=True)
class MooncakeRun:
    """One write of all objects, until the last was seen at the far end."""

    bytes_per_second: float
    cpu_seconds_per_gb: float  # both ends


def is_installed() -> bool:
    return importlib.util.find_spec("mooncake") is not None


class Mooncake:
    """Both ends as processes, for as long as the context lasts."""

    def __init__(self, wan: Wan, *, num_lanes: str) -> None:
        self._wan = wan
        self._environment = os.environ | {"MC_TCP_LANES_PER_PEER": num_lanes, "MC_LOG_LEVEL": "ERROR"}

    def __enter__(self) -> Mooncake:
        command = [sys.executable, "-m", "benchmarks.transport.mooncake"]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self._environment}
        self._far = self._wan.far([*command, FAR], **options)
        where = _read(self._far)
        self._near = self._wan.near([*command, NEAR, where["session"], str(where["address"])], **options)
        _read(self._near)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._near, self._far):
            process.kill()
            process.communicate()

    def write(self, num_bytes: int, *, num_objects: int, is_per_layer: bool) -> MooncakeRun:
        """Write objects at once, or with one call for each as a layer-wise connector does; checked by digest."""
        question = {
            "mark": int.from_bytes(os.urandom(MARK_BYTES), "little"),
            "sizes": [num_bytes // num_objects] * num_objects,
            "is_per_layer": is_per_layer,
        }
        for process in (self._far, self._near):
            _write(process, question)
        near, far = _read(self._near), _read(self._far)
        assert near["digest"] == far["digest"], "other bytes arrived than were sent"
        seconds = (far["ended_ns"] - near["began_ns"]) / 1e9
        return MooncakeRun(num_bytes / seconds, (near["cpu_seconds"] + far["cpu_seconds"]) / num_bytes * 1e9)


class _End:
    """One process's engine and the memory that it has registered."""

    def __init__(self, host: str) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        assert self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._pool = memoryview(mmap.mmap(-1, POOL_BYTES))
        pattern = os.urandom(1 << 20)
        for at in range(0, POOL_BYTES, len(pattern)):
            self._pool[at : at + len(pattern)] = pattern
        self.address = np.frombuffer(self._pool, np.uint8).ctypes.data
        assert self._engine.register_memory(self.address, POOL_BYTES) == 0

    def write(self, session: str, address: int, *, mark: int, sizes: Sequence[int], is_per_layer: bool) -> None:
        """Be the near end of one write."""
        at = np.cumsum([0, *sizes[:-1]]).tolist()
        for last in np.cumsum(sizes).tolist():
            self._pool[last - MARK_BYTES : last] = mark.to_bytes(MARK_BYTES, "little")
        cpu, began_ns = cpu_seconds(), time.monotonic_ns()
        sources, targets = [self.address + its for its in at], [address + its for its in at]
        if is_per_layer:
            for source, target, size in zip(sources, targets, sizes, strict=True):
                assert self._engine.transfer_sync_write(session, source, target, size) == 0
        else:
            assert self._engine.batch_transfer_sync_write(session, sources, targets, list(sizes)) == 0
        self._say_digest(sum(sizes), began_ns=began_ns, cpu_seconds=cpu_seconds() - cpu)

    def watch(self, *, mark: int, sizes: Sequence[int], is_per_layer: bool) -> None:
        """Be the far end of one write."""
        cpu, wanted = cpu_seconds(), mark.to_bytes(MARK_BYTES, "little")
        missing = np.cumsum(sizes).tolist()
        while missing:
            missing = [last for last in missing if self._pool[last - MARK_BYTES : last] != wanted]
            time.sleep(LOOK_SECONDS)
        self._say_digest(sum(sizes), ended_ns=time.monotonic_ns(), cpu_seconds=cpu_seconds() - cpu)

    def _say_digest(self, num_bytes: int, **fields: object) -> None:
        print(json.dumps(fields | {"digest": digest_of([self._pool[:num_bytes]])}), flush=True)


def _run(host: str, session: str = "", address: str = "0") -> None:
    end = _End(host)
    print(json.dumps({"session": end.session, "address": end.address}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if session:
            end.write(session, int(address), **question)
        else:
            end.watch(**question)


def _write(process: subprocess.Popen[str], question: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that is ours; the engine prints lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            read: dict[str, Any] = json.loads(line)
            return read
    raise RuntimeError(f"an end of the measurement has ended with {process.wait()}")


if __name__ == "__main__":
    _run(*sys.argv[1:])

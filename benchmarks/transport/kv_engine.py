"""Other transfer engines for KV over an emulated link: both ends as processes, and their measurements.

Mooncake: `pip install --no-deps mooncake-transfer-engine-non-cuda`; Debian: libibverbs1, libnuma1, librdmacm1.
NIXL over UCX's TCP: `pip install --no-deps nixl nixl-cu12`. LMCache: `lmcache_engine.py`.

The receiving end is not told when a write ends, so it polls for a mark at the end of each object. The figures include this,
a few percent of a core.
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
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks.transport.far_end import cpu_seconds, digest_of
from tools.wan import FAR, NEAR, Wan

POOL_BYTES = 1 << 30
MARK_BYTES = 8
POLL_SECONDS = 0.0005

EngineName = Literal["mooncake", "nixl", "lmcache"]


@dataclass(frozen=True)
class Setting:
    """Configuration of an engine."""

    engine: EngineName
    name: str
    environment: tuple[tuple[str, str], ...] = ()


SETTINGS = (
    Setting("mooncake", "default"),
    Setting("mooncake", "16 lanes", (("MC_TCP_LANES_PER_PEER", "16"),)),
    Setting("nixl", "UCX over TCP", (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "wan0"))),
    Setting("lmcache", "lm://"),
)


@dataclass(frozen=True)
class EngineRun:
    """Figures of one write, until the far end has seen the last object."""

    num_bytes: int
    began_ns: int  # Monotonic clock.
    ended_ns: int
    cpu_seconds_per_gb: float  # Processor time of both ends.


def is_installed(engine: EngineName) -> bool:
    return importlib.util.find_spec(engine) is not None


class EngineEnds:
    """Both ends as processes, which live as long as the context."""

    def __init__(self, wan: Wan, setting: Setting) -> None:
        self._wan = wan
        self._engine = setting.engine
        self._environment = os.environ | {"MC_LOG_LEVEL": "ERROR"} | dict(setting.environment)

    def __enter__(self) -> EngineEnds:
        module = "lmcache_engine" if self._engine == "lmcache" else "kv_engine"
        command = [sys.executable, "-m", f"benchmarks.transport.{module}", self._engine]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self._environment}
        self._far = self._wan.far([*command, FAR], **options)
        where = _read(self._far)
        self._near = self._wan.near([*command, NEAR, json.dumps(where)], **options)
        _read(self._near)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._near, self._far):
            process.kill()
            process.communicate()

    def write(self, num_bytes: int, *, num_objects: int, is_per_layer: bool) -> EngineRun:
        """Write objects at once, or with a call for each as layer-wise connectors do. Checks the digest."""
        question = {
            "mark": int.from_bytes(os.urandom(MARK_BYTES), "little"),
            "sizes": [num_bytes // num_objects] * num_objects,
            "is_per_layer": is_per_layer,
        }
        for process in (self._far, self._near):
            _write(process, question)
        near, far = _read(self._near), _read(self._far)
        assert near["digest"] == far["digest"], "the bytes arrived damaged"
        cpu = near["cpu_seconds"] + far["cpu_seconds"]
        return EngineRun(num_bytes, near["began_ns"], far["ended_ns"], cpu_seconds_per_gb=cpu / num_bytes * 1e9)


class _Engine(Protocol):
    """Engine of one process, with its pool registered. `where` tells the far end how to write there."""

    where: dict[str, str]

    def connect(self, where: dict[str, str]) -> None: ...
    def write(self, sources: list[int], targets: list[int], sizes: list[int]) -> None: ...


class _Mooncake:
    def __init__(self, host: str, address: int) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        assert self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(address, POOL_BYTES) == 0
        self.where = {"session": f"{host}:{self._engine.get_rpc_port()}"}

    def connect(self, where: dict[str, str]) -> None:
        self._session = where["session"]

    def write(self, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        assert self._engine.batch_transfer_sync_write(self._session, sources, targets, sizes) == 0


class _Nixl:
    def __init__(self, host: str, address: int) -> None:
        api = importlib.import_module("nixl._api")
        self._agent = api.nixl_agent(host, api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(address, POOL_BYTES, 0, "")], "DRAM")
        self.where = {"metadata": self._agent.get_agent_metadata().hex()}

    def connect(self, where: dict[str, str]) -> None:
        self._peer = self._agent.add_remote_agent(bytes.fromhex(where["metadata"]))

    def write(self, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        local, remote = (
            self._agent.get_xfer_descs([(at, size, 0) for at, size in zip(starts, sizes, strict=True)], "DRAM")
            for starts in (sources, targets)
        )
        transfer = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        state = self._agent.transfer(transfer)
        while state != "DONE":
            assert state != "ERR"
            time.sleep(POLL_SECONDS)
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)


_ENGINES: dict[str, type[_Mooncake] | type[_Nixl]] = {"mooncake": _Mooncake, "nixl": _Nixl}


class _End:
    """Memory and engine of one process."""

    def __init__(self, engine: str, host: str) -> None:
        self._pool = memoryview(mmap.mmap(-1, POOL_BYTES))
        pattern = os.urandom(1 << 20)
        for at in range(0, POOL_BYTES, len(pattern)):
            self._pool[at : at + len(pattern)] = pattern
        self._address = np.frombuffer(self._pool, np.uint8).ctypes.data
        self._engine: _Engine = _ENGINES[engine](host, self._address)
        self.where = {"address": str(self._address)} | self._engine.where

    def connect(self, where: dict[str, str]) -> None:
        self._engine.connect(where)
        self._target = int(where["address"])

    def write(self, *, mark: int, sizes: list[int], is_per_layer: bool) -> None:
        """Act as the near end of one write."""
        at = np.cumsum([0, *sizes[:-1]]).tolist()
        for last in np.cumsum(sizes).tolist():
            self._pool[last - MARK_BYTES : last] = mark.to_bytes(MARK_BYTES, "little")
        cpu, began_ns = cpu_seconds(), time.monotonic_ns()
        sources, targets = [self._address + offset for offset in at], [self._target + offset for offset in at]
        if is_per_layer:
            for source, target, size in zip(sources, targets, sizes, strict=True):
                self._engine.write([source], [target], [size])
        else:
            self._engine.write(sources, targets, sizes)
        self._print_digest(sum(sizes), began_ns=began_ns, cpu_seconds=cpu_seconds() - cpu)

    def watch(self, *, mark: int, sizes: Sequence[int], is_per_layer: bool) -> None:
        """Act as the far end of one write."""
        cpu, wanted = cpu_seconds(), mark.to_bytes(MARK_BYTES, "little")
        missing = np.cumsum(sizes).tolist()
        while missing:
            missing = [last for last in missing if self._pool[last - MARK_BYTES : last] != wanted]
            time.sleep(POLL_SECONDS)
        self._print_digest(sum(sizes), ended_ns=time.monotonic_ns(), cpu_seconds=cpu_seconds() - cpu)

    def _print_digest(self, num_bytes: int, **fields: object) -> None:
        print(json.dumps(fields | {"digest": digest_of([self._pool[:num_bytes]])}), flush=True)


def _run(engine: str, host: str, peer: str = "") -> None:
    end = _End(engine, host)
    if peer:
        end.connect(json.loads(peer))
    print(json.dumps(end.where), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if peer:
            end.write(**question)
        else:
            end.watch(**question)


def _write(process: subprocess.Popen[str], question: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next JSON line. The engines print lines of their own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            read: dict[str, Any] = json.loads(line)
            return read
    raise RuntimeError(f"an end of the measurement has ended with {process.wait()}")


if __name__ == "__main__":
    _run(*sys.argv[1:])

"""LMCache as a transfer engine: its own server at the far end, and the messages of its connector at the near end.

Needs `pip install --no-deps lmcache` and torch. Its protocol does not answer a PUT, so the far end polls the server's store.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.transport.far_end import cpu_seconds, digest_of
from tools.wan import FAR

POOL_BYTES = 1 << 30
POLL_SECONDS = 0.0005
# Imported by name, since they are no dependencies of the project.
_torch, _protocol, _utils, _memory = (
    importlib.import_module(name)
    for name in ("torch", "lmcache.v1.protocol", "lmcache.utils", "lmcache.v1.memory_management")
)


def keys_of(mark: int, count: int) -> list[Any]:
    """Return the names of the objects of one write."""
    return [_utils.CacheEngineKey("benchmark", 1, 0, (mark >> 8) + number, _torch.bfloat16) for number in range(count)]


class FarEnd:
    """Server of LMCache whose store is polled."""

    def __init__(self, host: str) -> None:
        self._server = importlib.import_module("lmcache.v1.server.__main__").LMCacheServer(host, 0, "cpu")
        threading.Thread(target=self._server.run, daemon=True).start()
        self.where = {"port": self._server.server_socket.getsockname()[1]}

    def answer(self, *, mark: int, sizes: Sequence[int], is_per_layer: bool) -> dict[str, object]:
        """Wait until all objects are stored, and return the figures."""
        cpu, keys, store = cpu_seconds(), keys_of(mark, len(sizes)), self._server.data_store
        while not all(store.contains(key) for key in keys):
            time.sleep(POLL_SECONDS)
        answer: dict[str, object] = {"ended_ns": time.monotonic_ns(), "cpu_seconds": cpu_seconds() - cpu}
        answer["digest"] = digest_of([memoryview(store.get(key).data) for key in keys])
        for key in keys:
            store.remove(key)
        return answer


class NearEnd:
    """Sender that does what the connector does for a PUT: a message, then the bytes, on one socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((FAR, port))
        self._pool = memoryview(mmap.mmap(-1, POOL_BYTES))
        pattern = os.urandom(1 << 20)
        for at in range(0, POOL_BYTES, len(pattern)):
            self._pool[at : at + len(pattern)] = pattern
        self.where: dict[str, object] = {}

    def answer(self, *, mark: int, sizes: Sequence[int], is_per_layer: bool) -> dict[str, object]:
        """Send all objects one after another, which is the only way of the connector."""
        cpu, began_ns, at = cpu_seconds(), time.monotonic_ns(), 0
        for key, size in zip(keys_of(mark, len(sizes)), sizes, strict=True):
            shape = _torch.Size([size // 2, 1, 1, 1])
            put = _protocol.ClientCommand.PUT
            head = _protocol.ClientMetaMessage(put, key, size, _memory.MemoryFormat(1), _torch.bfloat16, shape)
            self._socket.sendall(head.serialize())
            self._socket.sendall(self._pool[at : at + size])
            at += size
        cpu = cpu_seconds() - cpu
        return {"began_ns": began_ns, "cpu_seconds": cpu, "digest": digest_of([self._pool[:at]])}


def _run(host: str, peer: str = "") -> None:
    end = NearEnd(json.loads(peer)["port"]) if peer else FarEnd(host)
    print(json.dumps(end.where), flush=True)
    for line in sys.stdin:
        print(json.dumps(end.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    _run(*sys.argv[2:])

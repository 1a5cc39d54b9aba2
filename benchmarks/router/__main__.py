"""Requests per second of router CPU, and what the router adds to the median, against the engine asked directly.

    python -m benchmarks.router            # short prompts (400 B), then the P/D path (600 token ids)

Rates are per second of the router's own CPU time, so that other load on the machine hardly matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from tests.free_ports import free_address

NUM_WARM_UP = 200
NUM_REQUESTS = 3000
SHORT = {"model": "m", "prompt": "x" * 340, "max_tokens": 1, "temperature": 0}
LONG = {"model": "m", "prompt": list(range(1000, 1600)), "max_tokens": 1, "temperature": 0}


@dataclass(frozen=True)
class Figures:
    """One run: wall seconds of each request, and the CPU seconds that a process took for all of them."""

    latencies: list[float]
    cpu_seconds: float

    def line(self, name: str) -> str:
        rate = f"{len(self.latencies) / self.cpu_seconds:9.0f} /CPU-s" if self.cpu_seconds else ""
        median, worst = statistics.median(self.latencies) * 1e3, statistics.quantiles(self.latencies, n=100)[-1] * 1e3
        return f"{name:34} {rate:16}   p50 {median:6.2f} ms   p99 {worst:6.2f} ms"


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextlib.asynccontextmanager
async def _deployment(directory: Path) -> AsyncIterator[tuple[int, str, str]]:
    """Router pid, its address, the decode engine's."""
    east, west, listen = free_address(), free_address(), free_address()
    secret = directory / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    config = {
        "listen": listen,
        "secret_file": str(secret),
        "threshold_tokens": 500,
        "probe_interval": "1s",
        "clusters": [_cluster("east", "prfaas", "prefill", east), _cluster("west", "pd", "both", west)],
    }
    (directory / "router.yaml").write_text(yaml.safe_dump(config))
    engine = (sys.executable, "-m", "benchmarks.router.engine")
    router = (sys.executable, "-m", "prfaas.cli.router", "--config", str(directory / "router.yaml"))
    with (
        _process(*engine, east.rpartition(":")[2]),
        _process(*engine, west.rpartition(":")[2]),
        _process(*router) as running,
    ):
        await _ready(listen)
        yield running.pid, listen, west


def _cluster(name: str, kind: str, role: str, address: str) -> dict[str, Any]:
    its = {"name": f"{name}/0", "url": f"http://{address}", "role": role, "agent": name, "wire": "127.0.0.1:1"}
    return {"name": name, "kind": kind, "instances": [its]}


async def _ready(address: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if b" 200 " in (await _ask(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 1))[1]:
                    return
            await asyncio.sleep(0.1)


async def _ask(address: str, request: bytes, num: int) -> tuple[list[float], bytes]:
    """Send `request` `num` times over one connection; seconds of each, and the last head."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    seconds, head = [], b""
    try:
        for _ in range(num):
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length[15:]))
            seconds.append(time.perf_counter() - started)
    finally:
        writer.close()
    return seconds, head


def _post(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the kernel's clock of 100 ticks a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def _measure(pid: int, address: str, body: dict[str, Any], *, connections: int) -> Figures:
    request = _post(body)
    await _ask(address, request, NUM_WARM_UP)
    before = _cpu_seconds(pid)
    runs = await asyncio.gather(*(_ask(address, request, NUM_REQUESTS // connections) for _ in range(connections)))
    return Figures([one for seconds, _ in runs for one in seconds], _cpu_seconds(pid) - before)


async def _main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with _deployment(Path(directory)) as (pid, router, engine):
            direct = await _measure(pid, engine, SHORT, connections=1)
            print(Figures(direct.latencies, 0.0).line("engine directly, 1 connection"))
            for name, body in (("local", SHORT), ("prefill and decode", LONG)):
                for connections in (1, 32):
                    figures = await _measure(pid, router, body, connections=connections)
                    print(figures.line(f"{name}, {connections} connection{'s' * (connections > 1)}"))


if __name__ == "__main__":
    uvloop.run(_main())

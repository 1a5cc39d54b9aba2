"""The front door before engines that cost nothing, beside other routers: requests per CPU second, and what it adds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.router import peers
from tools.free_ports import free_address

ROUNDS = 3
NUM_WARM_UP = 300
NUM_REQUESTS = 2000
NUM_CONNECTIONS = 32
READY_SECONDS = 60.0
SHORT = {"model": "m", "prompt": "x" * 340, "max_tokens": 1, "temperature": 0}
LONG = {"model": "m", "prompt": list(range(1000, 1600)), "max_tokens": 1, "temperature": 0}
TEXT = {"model": "m", "prompt": "lorem " * 36_667, "max_tokens": 1, "temperature": 0}  # 220 KB
NUM_TEXTS = 60
TOKENIZE = {"model": "m", "prompt": TEXT["prompt"]}


@dataclass(frozen=True)
class Engines:
    """Addresses of what answers."""

    prefill: str
    decode: str


@dataclass(frozen=True)
class Run:
    """One router under one load."""

    latencies: tuple[float, ...]  # Wall time of each request.
    cpu_seconds: float  # CPU time of the router's processes for all requests.

    @property
    def per_cpu_second(self) -> float:
        return len(self.latencies) / self.cpu_seconds

    @property
    def median(self) -> float:
        return statistics.median(self.latencies)


@contextlib.contextmanager
def _process(*command: str, log: Path) -> Any:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


@contextlib.asynccontextmanager
async def engines(directory: Path) -> AsyncIterator[Engines]:
    """A prefill and a decode engine."""
    both = Engines(free_address(), free_address())
    with contextlib.ExitStack() as running:
        for address in (both.prefill, both.decode):
            command = (sys.executable, "-m", "benchmarks.router.engine", address.rpartition(":")[2])
            running.enter_context(_process(*command, log=directory / f"engine-{address}"))
            await _ready(address)
        yield both


@contextlib.asynccontextmanager
async def router(directory: Path, behind: Engines) -> AsyncIterator[tuple[int, str]]:
    """Ours: its pid and address."""
    listen = free_address()
    secret = directory / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    config = {
        "listen": listen,
        "secret_file": str(secret),
        "threshold_tokens": 500,
        "clusters": [
            _cluster("east", "prfaas", "prefill", behind.prefill),
            _cluster("west", "pd", "both", behind.decode),
        ],
    }
    (directory / "router.yaml").write_text(yaml.safe_dump(config))
    command = (sys.executable, "-m", "prfaas.cli.router", "--config", str(directory / "router.yaml"))
    with _process(*command, log=directory / "router.log") as running:
        await _ready(listen)
        yield running.pid, listen


@contextlib.asynccontextmanager
async def peer(kind: peers.Peer, directory: Path, behind: Engines) -> AsyncIterator[tuple[int, str]]:
    """Another router: its pid and address."""
    listen = free_address()
    command = kind.command(listen.rpartition(":")[2], f"http://{behind.prefill}", f"http://{behind.decode}")
    assert command is not None, "only installed ones are run"
    with _process(*command, log=directory / f"{kind.name.replace('/', '')}.log") as running:
        await _ready(listen)
        yield running.pid, listen


def _cluster(name: str, kind: str, role: str, address: str) -> dict[str, Any]:
    instance = {"name": f"{name}/0", "url": f"http://{address}", "role": role, "agent": name, "wire": "127.0.0.1:1"}
    return {"name": name, "kind": kind, "instances": [instance]}


async def _ready(address: str) -> None:
    """Until a completion is answered."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if b" 200 " in (await _ask(address, _post("/v1/completions", SHORT), 1))[1]:
                    return
            await asyncio.sleep(0.2)


async def _ask(address: str, request: bytes, num: int) -> tuple[list[float], bytes]:
    """Send `request` `num` times over one connection; seconds of each, and the last head."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    seconds, head = [], b""
    try:
        for _ in range(num):
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await _read_body(reader, head.lower())
            seconds.append(time.perf_counter() - started)
    finally:
        writer.close()
    return seconds, head


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> None:
    lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    if lengths:
        await reader.readexactly(int(lengths[0][15:]))
        return
    while (await reader.readuntil(b"\r\n")) != b"0\r\n":  # Chunked: a size, then as many bytes and an end of line.
        await reader.readuntil(b"\r\n")
    await reader.readuntil(b"\r\n")


def _post(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children, from the kernel's clock of 100 ticks a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / 100 + sum(_cpu_seconds(int(child)) for child in children)


async def load(pid: int, address: str, body: dict[str, Any], *, connections: int, num: int = NUM_REQUESTS) -> Run:
    """So many completions over so many connections, after a warm-up."""
    request = _post("/v1/completions", body)
    await _ask(address, request, min(num, NUM_WARM_UP))
    before = _cpu_seconds(pid)
    runs = await asyncio.gather(*(_ask(address, request, num // connections) for _ in range(connections)))
    return Run(tuple(second for seconds, _ in runs for second in seconds), _cpu_seconds(pid) - before)


async def directly(
    address: str, body: dict[str, Any], *, path: str = "/v1/completions", num: int = NUM_REQUESTS
) -> float:
    """Return the median of the engine itself, in seconds."""
    seconds, _ = await _ask(address, _post(path, body), num)
    return statistics.median(seconds)


async def measure(directory: Path) -> list[dict[str, Any]]:
    """Rows: figure, bar, and what the peers reach."""
    async with engines(directory) as behind:
        rows = [row async for row in _rows(directory, behind)]
        async with router(directory, behind) as (pid, address):
            rows.append(await _text_row(pid, address, behind))
    return rows


async def _rows(directory: Path, behind: Engines) -> AsyncIterator[dict[str, Any]]:
    for name, body, disaggregates, rate_bar, added_bar in (
        ("short prompts", SHORT, False, 1500, 0.6e-3),
        ("prefill and decode", LONG, True, 500, 2e-3),
    ):
        rivals = [
            peer_kind
            for peer_kind in peers.of_kind(disaggregates=disaggregates)
            if peer_kind.command("", "", "") is not None
        ]
        rates, added = dict[str, list[float]](), dict[str, list[float]]()
        for _ in range(ROUNDS):
            async for who, run, direct in _round(directory, behind, body, rivals):
                rates.setdefault(who, []).append(run[1].per_cpu_second)
                added.setdefault(who, []).append(run[0].median - direct)
        python = [rival.name for rival in rivals if rival.is_python]
        yield _row(
            f"{name}: requests per CPU second, 32 connections",
            rates,
            f">= {rate_bar}, and ahead of Python routers",
            holds=_median(rates["prfaas"]) >= max([rate_bar, *(_median(rates[who]) for who in python)]),
        )
        yield _row(
            f"{name}: added at the median, ms, 1 connection",
            _scaled(added, 1e3),
            f"<= {added_bar * 1e3:g}, and less than Python routers",
            holds=_median(added["prfaas"]) <= min([added_bar, *(_median(added[who]) for who in python)]),
        )


async def _round(
    directory: Path, behind: Engines, body: dict[str, Any], rivals: Iterable[peers.Peer]
) -> AsyncIterator[tuple[str, tuple[Run, Run], float]]:
    direct = await directly(behind.decode, body)
    async with router(directory, behind) as (pid, address):
        yield "prfaas", await _both(pid, address, body), direct
    for rival in rivals:
        async with peer(rival, directory, behind) as (pid, address):
            yield rival.name, await _both(pid, address, body), direct


async def _both(pid: int, address: str, body: dict[str, Any]) -> tuple[Run, Run]:
    alone = await load(pid, address, body, connections=1)
    return alone, await load(pid, address, body, connections=NUM_CONNECTIONS)


async def _text_row(pid: int, address: str, behind: Engines) -> dict[str, Any]:
    """Return a prompt of 220 KB: what the door adds beyond the engine's own answer and its tokenizer's."""
    added = []
    for _ in range(ROUNDS):
        answer = await directly(behind.decode, TEXT, num=NUM_TEXTS)
        tokenizing = await directly(behind.decode, TOKENIZE, path="/tokenize", num=NUM_TEXTS)
        own = await load(pid, address, TEXT, connections=1, num=NUM_TEXTS)
        added.append((own.median - answer - tokenizing) * 1e3)
    name = "a text of 220 KB: added at the median beyond the tokenizer's time, ms"
    return _row(name, {"prfaas": added}, "<= 15", holds=_median(added) <= 15)


def _row(name: str, figures: dict[str, list[float]], bar: str, *, holds: bool) -> dict[str, Any]:
    own = figures.pop("prfaas")
    return {
        "name": name,
        "figure": _spread(own),
        "bar": bar,
        "holds": holds,
        "peers": {who: _spread(values) for who, values in figures.items()},
    }


def _scaled(figures: dict[str, list[float]], factor: float) -> dict[str, list[float]]:
    return {who: [value * factor for value in values] for who, values in figures.items()}


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(_median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}

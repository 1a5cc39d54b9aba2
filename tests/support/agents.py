"""Agents and engines as tests hold them: real agents, in a process or on a thread, and what a connector does by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prfaas import config, grants
from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import HELD, Message, ReceiveReady, SendOpened
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.prefix import store
from prfaas.cachepool.ssd import SsdSettings
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import AgentName, GroupBlocks, Shard, TransferId
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.client import get_json
from tools.free_ports import free_address

MODEL = "tiny"
NUM_TOKENS = 200
ROOT = root_hash(MODEL)


def layout(*, model: str = MODEL, dtype: str = "float32", shard_size: int = 1) -> Layout:
    def layer(name: str, offset: int, size: int) -> LayerSlice:
        return LayerSlice(name, offset, size, dtype, "head,token,kv_dim")

    full = KVGroup("full_attention", 32, (layer("a0", 0, 6000), layer("a1", 6000, 6000)))
    state = KVGroup("linear_state", 32, (layer("s0", 0, 50_000),))
    return Layout(model, "", Shard(0, shard_size), (full, state))


def blocks(chain: HashChain, num_tokens: int) -> tuple[GroupBlocks, ...]:
    full_units = num_tokens // 16 * 16
    return (
        GroupBlocks(0, 0, chain.blocks(32, first_block=0, num_tokens=num_tokens), ROOT),
        GroupBlocks(1, 0, (chain.at(num_tokens),), chain.at(full_units)),
    )


class AgentThread:
    """An agent on a thread of this process: it starts in no time; its counters are those of all others here."""

    def __init__(self, settings: AgentConfig, secret: bytes) -> None:
        self._settings, self._secret = settings, secret
        self._is_told = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()

    async def _run(self) -> None:
        running = asyncio.ensure_future(Agent(self._settings, self._secret).run())
        told = asyncio.ensure_future(self._is_told.wait())
        await asyncio.wait([running, told], return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    def terminate(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_told.set)

    def wait(self, seconds: float) -> int:
        """0, once it has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the agent does not end"
        self._loop.close()
        return 0


Child = subprocess.Popen[bytes] | AgentThread
Launch = Callable[[dict[str, str], Path], Child]


def in_process(settings: dict[str, str], log: Path) -> Child:
    """An agent process with these flags."""
    flags = [f"--{key}={value}" for key, value in settings.items()]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "prfaas.cli.agent", *flags], stderr=file)


def on_thread(settings: dict[str, str], log: Path) -> Child:
    """An agent on a thread of this process; it writes no log."""
    flags = {key.replace("-", "_"): value for key, value in settings.items()}
    return AgentThread(
        config.load(AgentConfig, component="agent", environment={}, flags=flags),
        grants.read_secret(Path(settings["secret-file"])),
    )


@dataclass
class RunningAgent:
    """An agent that serves."""

    name: str
    child: Child
    socket: Path
    wire: str
    status: str

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert isinstance(self.child, subprocess.Popen), "it runs on a thread"
        return self.child

    def stop(self) -> None:
        """Have it end in good order."""
        self.child.terminate()
        self.ended()

    def ended(self) -> None:
        """Wait until it has."""
        code = self.child.wait(PATIENCE_SECONDS)
        assert code in (0, -signal.SIGKILL), f"{self.name} ended with {code}"

    def transfers(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = get_json(f"http://{self.status}/transfers")
        return found

    def pool(self) -> dict[str, int]:
        kinds: dict[str, int] = get_json(f"http://{self.status}/status")["pool"]
        return kinds


class Agents:
    """Starts agents that share a secret."""

    def __init__(self, directory: Path, secret: bytes | None = None, *, launch: Launch = in_process) -> None:
        self._launch = launch
        self.directory = directory
        self.secret = secret or secrets.token_bytes(32)
        self._secret_file = directory / "agents-secret"
        self._secret_file.write_bytes(self.secret)
        self._secret_file.chmod(0o600)
        self._running: list[RunningAgent] = []
        self._engines: list[Engine] = []

    def engine(
        self, agent: RunningAgent, name: str, its_layout: Layout | None = None, *, attaches_worker: bool = True
    ) -> Engine:
        made = Engine(agent, name, its_layout, attaches_worker=attaches_worker)
        self._engines.append(made)
        return made

    def start(self, name: str, **settings: str) -> RunningAgent:
        wire, status = free_address(), free_address()
        socket = self.directory / f"{name}.sock"
        values = {"name": name, "socket": str(socket), "listen": wire, "status-listen": status}
        values |= {"secret-file": str(self._secret_file), "pool-bytes": "16MiB"}
        values |= {"reconnect-seconds": f"{PATIENCE_SECONDS:.0f}s"} | settings
        child = self._launch(values, self.directory / f"{name}.log")
        agent = RunningAgent(name, child, socket, wire, status)
        self._running.append(agent)
        wait_until(lambda: socket.exists() and _answers(status), what=name)
        return agent

    def stop(self) -> None:
        for engine in self._engines:
            engine.close()
        for agent in self._running:
            agent.child.terminate()
        for agent in self._running:
            agent.ended()

    def grant(
        self, sender: str, destination: RunningAgent, chain: HashChain, **changes: object
    ) -> tuple[TransferId, bytes]:
        transfer_id = TransferId(os.urandom(16))
        fields: dict[str, object] = {
            "transfer_id": transfer_id,
            "source": AgentName(sender),
            "destination": AgentName(destination.name),
            "destination_address": destination.wire,
            "prompt_hash": chain.at(chain.num_tokens),
            "num_tokens": chain.num_tokens,
            "max_bytes": 1 << 20,
            "tenant": "",
            "expires_at": time.time() + 600.0,
        } | changes
        key = grants.derive_key(self.secret, "grant")
        return transfer_id, grants.sign(grants.Grant(**fields), key)  # type: ignore[arg-type]


def slow_ssd(monkeypatch: pytest.MonkeyPatch, *, wait_seconds: float) -> None:
    """Let agents that start on threads from now on read 1 kB/s from their SSD, and engines wait this long."""
    settings_of = AgentConfig.ssd

    def slow_settings(config: AgentConfig) -> SsdSettings | None:
        settings = settings_of(config)
        return settings and replace(settings, read_bytes_per_second=1e3)

    monkeypatch.setattr(AgentConfig, "ssd", slow_settings)
    monkeypatch.setattr(store, "SSD_WAIT_SECONDS", wait_seconds)


def _answers(status: str) -> bool:
    try:
        return bool(get_json(f"http://{status}/healthz"))
    except OSError:
        return False


class Engine:
    """What a connector does, by hand: a scheduler and one worker."""

    def __init__(
        self, agent: RunningAgent, name: str, its_layout: Layout | None = None, *, attaches_worker: bool = True
    ) -> None:
        self._path, self._name, self._layout = str(agent.socket), name, its_layout or layout()
        self._worker: AgentClient | None = None
        if attaches_worker:
            self.attach_worker()
        self.attach_scheduler()
        self._unread: list[Message] = []

    def attach_worker(self) -> None:
        self._worker = AgentClient(self._path, instance=self._name, role="worker", layout=self._layout)

    def attach_scheduler(self) -> None:
        self.scheduler = AgentClient(self._path, instance=self._name, role="scheduler")

    @property
    def worker(self) -> AgentClient:
        assert self._worker is not None, "it has no worker yet"
        return self._worker

    def wait(self, kind: type[Message] | tuple[type[Message], ...], *, seconds: float = PATIENCE_SECONDS) -> Message:
        """The next message, which must be of this kind; those that came with it wait for the next call."""
        deadline = time.monotonic() + seconds
        while not self._unread:
            assert time.monotonic() < deadline, f"no {kind} within {seconds} s"
            self._unread += self.scheduler.poll(0.05)
        message = self._unread.pop(0)
        assert isinstance(message, kind), f"unexpected {message}"
        return message

    def slot(self, slot: int, offset: int, length: int) -> memoryview:
        attached = self.worker.attached
        start = attached.header_bytes + slot * attached.slot_bytes + offset
        return self.worker.arena[start : start + length]

    def write_layer(self, opened: SendOpened, position: int, layer: int, *, blocks: range, seed: int = 0) -> None:
        piece = layout().groups[position].layers[layer]
        for block in blocks:
            slot = opened.slots[0][position][block]
            if slot != HELD:
                self.slot(slot, piece.offset_bytes, piece.payload_bytes)[:] = content(position, block, layer, seed)
        entry = RingEntry(EntryKind.LAYER_READY, opened.handle, position, layer, blocks.start, len(blocks))
        assert self.worker.ring is not None and self.worker.ring.push(entry)

    def write_layers(self, opened: SendOpened, *, seed: int = 0) -> None:
        num_blocks = len(opened.slots[0][0])
        for layer in (0, 1):
            self.write_layer(opened, 0, layer, blocks=range(num_blocks), seed=seed)
        self.write_layer(opened, 1, 0, blocks=range(1), seed=seed)

    def write_all(self, opened: SendOpened, *, seed: int = 0) -> None:
        self.write_layers(opened, seed=seed)
        assert self.worker.ring is not None
        self.worker.ring.push(RingEntry(EntryKind.FORWARD_ENDED, opened.handle, group=1))

    def assert_content(self, ready: ReceiveReady, *, seed: int = 0) -> None:
        for position, group in enumerate(layout().groups):
            for block, slot in enumerate(ready.slots[0][position]):
                for layer, piece in enumerate(group.layers):
                    got = self.slot(slot, piece.offset_bytes, piece.payload_bytes)
                    assert bytes(got) == content(position, block, layer, seed), (position, block, layer)

    def close(self) -> None:
        self.scheduler.close()
        if self._worker is not None:
            self._worker.close()


def content(position: int, block: int, layer: int, seed: int) -> bytes:
    size = layout().groups[position].layers[layer].payload_bytes
    pattern = bytes((position * 7 + block * 13 + layer * 29 + seed + i) % 251 for i in range(997))
    return (pattern * (size // 997 + 1))[:size]


def chain_of(*, first: int = 0, length: int = NUM_TOKENS) -> HashChain:
    return HashChain(ROOT, range(first, first + length))

"""Real agents, in a process or on a thread, and engines that speak their protocol by hand."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prfaas import config, grants
from prfaas.agent.config import AgentConfig
from prfaas.agent.daemon import Agent
from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    HELD,
    Hold,
    LookedUp,
    Lookup,
    Message,
    Receive,
    ReceiveReady,
    Send,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.prefix import store
from prfaas.cachepool import ssd
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import GroupBlocks, Shard, TransferId
from tests.support.transfer_grants import make_grant
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.client import get_json
from tools.free_ports import free_address

M = TypeVar("M", bound=Message)
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


def exact_blocks(chain: HashChain) -> tuple[GroupBlocks, ...]:
    """Return the blocks of a prompt, with the partial last block named by its exact length."""
    full = chain.blocks(32, first_block=0, num_tokens=chain.num_tokens)
    tail = (*full[:-1], chain.at(chain.num_tokens)) if chain.num_tokens % 32 else full
    unit = chain.num_tokens // 16 * 16
    return GroupBlocks(0, 0, tail, chain.root), GroupBlocks(1, 0, (chain.at(chain.num_tokens),), chain.at(unit))


class AgentThread:
    """Agent on a thread of this process: it starts fast, and shares the metrics of this process."""

    def __init__(self, settings: AgentConfig, secret: bytes) -> None:
        self._settings, self._secret = settings, secret
        self._is_told = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # Ends what the agent leaves, as in production.
            runner.run(self._run())

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
        """Return 0 once the agent has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the agent does not end"
        return 0


Child = subprocess.Popen[bytes] | AgentThread
Launch = Callable[[dict[str, str], Path], Child]


def in_process(settings: dict[str, str], log: Path) -> Child:
    """Start an agent process with these flags."""
    flags = [f"--{key}={value}" for key, value in settings.items()]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "prfaas.cli.agent", *flags], stderr=file)


def on_thread(settings: dict[str, str], log: Path) -> Child:
    """Start an agent on a thread of this process; it writes no log."""
    names = {config.flag(path): ".".join(path) for path, _ in config.paths(AgentConfig)}
    flags = {names[f"--{key}"]: value for key, value in settings.items()}
    return AgentThread(
        config.load(AgentConfig, component="agent", environment={}, flags=flags),
        grants.read_secret(Path(settings["secret-file"])),
    )


@dataclass
class RunningAgent:
    """Agent that has started."""

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
        """Stop the agent and wait for its end."""
        self.child.terminate()
        self.ended()

    def ended(self) -> None:
        """Wait for the agent's end."""
        code = self.child.wait(PATIENCE_SECONDS)
        assert code in (0, -signal.SIGKILL), f"{self.name} ended with {code}"

    def transfers(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = get_json(f"http://{self.status}/transfers")
        return found

    def status_page(self) -> dict[str, Any]:
        page: dict[str, Any] = get_json(f"http://{self.status}/status")
        return page

    def pool(self) -> dict[str, int]:
        kinds: dict[str, int] = self.status_page()["pool"]
        return kinds


class Agents:
    """Agents that share a secret, with the engines beside them."""

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
        self, agent: RunningAgent, name: str, own_layout: Layout | None = None, *, attaches_workers: bool = True
    ) -> Engine:
        made = Engine(agent, name, own_layout or layout(), attaches_workers=attaches_workers)
        self._engines.append(made)
        return made

    def start(self, name: str, **settings: str) -> RunningAgent:
        wire, status = free_address(), free_address()
        socket = self.directory / f"{name}.sock"
        values = {"name": name, "socket": str(socket), "listen": wire, "status-listen": status}
        values |= {"secret-file": str(self._secret_file), "pool-bytes": "16MiB"}
        values |= {"silence-seconds": f"{PATIENCE_SECONDS:.0f}s"} | settings
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
        fields = {"max_bytes": 1 << 20, "expires_at": time.time() + 600.0} | changes
        grant = make_grant(sender, destination, chain, **fields)
        return grant.transfer_id, grants.sign(grant, grants.derive_key(self.secret, "grant"))


def block_ssd(monkeypatch: pytest.MonkeyPatch, *, wait_seconds: float) -> None:
    """Let running agents on threads begin no read from their SSD from now on, and engines wait this long."""
    monkeypatch.setattr(ssd, "NUM_THREADS", 0)
    monkeypatch.setattr(store, "SSD_WAIT_SECONDS", wait_seconds)


def _answers(status: str) -> bool:
    try:
        return bool(get_json(f"http://{status}/healthz"))
    except OSError:
        return False


class AttachedEngine:
    """Scheduler and workers of an engine, one worker for each layout, whose messages and slots a test handles."""

    def __init__(self, agent: RunningAgent, name: str, *layouts: Layout, attaches_workers: bool = True) -> None:
        self._path, self._name, self.layouts = str(agent.socket), name, layouts
        self._schedulers: list[AgentClient] = []
        self.workers: list[AgentClient] = []
        if attaches_workers:
            self.attach_workers()
        self.attach_scheduler()
        self._unread: list[Message] = []

    def attach_workers(self) -> None:
        self.workers = [
            AgentClient(self._path, instance=self._name, role="worker", rank=rank, layout=layout)
            for rank, layout in enumerate(self.layouts)
        ]

    def attach_scheduler(self) -> None:
        self.scheduler = AgentClient(self._path, instance=self._name, role="scheduler")
        self._schedulers.append(self.scheduler)

    def wait(self, kind: type[M], *, seconds: float = PATIENCE_SECONDS) -> M:
        """Return the next message, which must be of this kind."""
        message = self.wait_any(seconds=seconds)
        assert isinstance(message, kind), f"unexpected {message}"
        return message

    def wait_any(self, *, seconds: float = PATIENCE_SECONDS) -> Message:
        """Return the next message; messages that came with it wait for the next call."""
        deadline = time.monotonic() + seconds
        while not self._unread:
            assert time.monotonic() < deadline, f"no message within {seconds} s"
            self._unread += self.scheduler.poll(0.05)
        return self._unread.pop(0)

    def fails(self, reason: str) -> TransferFailed:
        """Return the next message, which must be a failure for this reason."""
        failed = self.wait(TransferFailed)
        assert failed.reason == reason, failed
        return failed

    def push(self, entry: RingEntry, *, rank: int = 0) -> None:
        """Write an entry to a worker's ring."""
        ring = self.workers[rank].ring
        assert ring is not None and ring.push(entry)

    def slot(self, slot: int, offset: int, length: int, *, rank: int = 0) -> memoryview:
        attached = self.workers[rank].attached
        start = attached.header_bytes + slot * attached.slot_bytes + offset
        return self.workers[rank].arena[start : start + length]

    def close(self) -> None:
        for client in (*self._schedulers, *self.workers):
            client.close()


class Engine(AttachedEngine):
    """Engine of one rank, which does by hand what a connector does."""

    def open_send(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> SendOpened:
        """Send the blocks of a prompt, and return their slots."""
        self.scheduler.post(Send(transfer_id, grant, blocks(chain, chain.num_tokens)))
        return self.wait(SendOpened)

    def claim(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> None:
        """Claim the blocks of a prompt."""
        groups = blocks(chain, chain.num_tokens)
        self.scheduler.post(Receive(transfer_id, grant, chain.at(chain.num_tokens), groups))

    def open_store(self, chain: HashChain) -> SendOpened:
        """Store the blocks of a prompt, and return their slots."""
        self.scheduler.post(Store(TransferId(os.urandom(16)), chain.num_tokens, exact_blocks(chain)))
        return self.wait(SendOpened)

    def store(self, chain: HashChain, *, seed: int = 0) -> None:
        """Store the blocks of a prompt and write all of them."""
        opened = self.open_store(chain)
        self.write_all(opened, seed=seed)
        self.push(RingEntry(EntryKind.REQUEST_ENDED, opened.handle))

    def look_up(self, chain: HashChain) -> LookedUp:
        """Return the agent's answer for a prompt."""
        units, limit = b"".join(chain.units), chain.num_tokens - 1
        self.scheduler.post(Lookup(TransferId(os.urandom(16)), chain.root, units, limit))
        return self.wait(LookedUp)

    def lengths(self, chain: HashChain) -> list[list[object]]:
        """Return the lengths of a prompt that the agent can serve."""
        return self.look_up(chain).lengths

    def hold(self, chain: HashChain) -> ReceiveReady | TransferFailed:
        """Ask for the stored blocks of a prompt, and return the answer."""
        self.scheduler.post(Hold(TransferId(os.urandom(16)), chain.num_tokens, exact_blocks(chain)))
        answer = self.wait_any()
        assert isinstance(answer, ReceiveReady | TransferFailed), f"unexpected {answer}"
        return answer

    def write_layer(self, opened: SendOpened, position: int, layer: int, *, blocks: range, seed: int = 0) -> None:
        piece = layout().groups[position].layers[layer]
        for block in blocks:
            slot = opened.slots[0][position][block]
            if slot != HELD:
                self.slot(slot, piece.offset_bytes, piece.payload_bytes)[:] = content(position, block, layer, seed)
        self.push(RingEntry(EntryKind.LAYER_READY, opened.handle, position, layer, blocks.start, len(blocks)))

    def write_layers(self, opened: SendOpened, *, seed: int = 0) -> None:
        num_blocks = len(opened.slots[0][0])
        for layer in (0, 1):
            self.write_layer(opened, 0, layer, blocks=range(num_blocks), seed=seed)
        self.write_layer(opened, 1, 0, blocks=range(1), seed=seed)

    def write_all(self, opened: SendOpened, *, seed: int = 0) -> None:
        self.write_layers(opened, seed=seed)
        self.push(RingEntry(EntryKind.FORWARD_ENDED, opened.handle, group=1))

    def assert_content(self, ready: ReceiveReady, *, seed: int = 0) -> None:
        for position, group in enumerate(layout().groups):
            for block, slot in enumerate(ready.slots[0][position]):
                for layer, piece in enumerate(group.layers):
                    got = self.slot(slot, piece.offset_bytes, piece.payload_bytes)
                    assert bytes(got) == content(position, block, layer, seed), (position, block, layer)


def content(position: int, block: int, layer: int, seed: int) -> bytes:
    size = layout().groups[position].layers[layer].payload_bytes
    pattern = bytes((position * 7 + block * 13 + layer * 29 + seed + i) % 251 for i in range(997))
    return (pattern * (size // 997 + 1))[:size]


def chain_of(*, first: int = 0, length: int = NUM_TOKENS) -> HashChain:
    return HashChain(ROOT, range(first, first + length))

"""Two real agents over real TCP: an engine's layers arrive in the other engine's slots."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas import grants
from prfaas.agent.client import AgentClient
from prfaas.agent.protocol import (
    HELD,
    Cancel,
    Message,
    Receive,
    ReceiveReady,
    Release,
    Send,
    SendOpened,
    TransferDone,
    TransferFailed,
)
from prfaas.agent.ring import EntryKind, RingEntry
from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.console.authority import Authority
from prfaas.errors import AgentUnreachable, LayoutError
from prfaas.hashing import HashChain, root_hash
from prfaas.types import AgentName, GroupBlocks, Shard, TransferId
from tests.free_ports import free_address
from tests.waiting import wait_until
from tools.demo.client import get_json
from tools.link import Relay

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


@dataclass
class RunningAgent:
    """An agent process."""

    name: str
    process: subprocess.Popen[bytes]
    socket: Path
    wire: str
    status: str

    def transfers(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = get_json(f"http://{self.status}/transfers")
        return found

    def pool(self) -> dict[str, int]:
        kinds: dict[str, int] = get_json(f"http://{self.status}/status")["pool"]
        return kinds


class Agents:
    """Starts agents that share a secret."""

    def __init__(self, directory: Path, secret: bytes | None = None) -> None:
        self.directory = directory
        self.secret = secret or secrets.token_bytes(32)
        self._secret_file = directory / "agents-secret"
        self._secret_file.write_bytes(self.secret)
        self._secret_file.chmod(0o600)
        self._running: list[RunningAgent] = []
        self._engines: list[Engine] = []

    def engine(self, agent: RunningAgent, name: str, its_layout: Layout | None = None) -> Engine:
        made = Engine(agent, name, its_layout)
        self._engines.append(made)
        return made

    def start(self, name: str, **settings: str) -> RunningAgent:
        wire, status = free_address(), free_address()
        socket = self.directory / f"{name}.sock"
        values = {"name": name, "socket": str(socket), "listen": wire, "status-listen": status}
        values |= {"secret-file": str(self._secret_file), "pool-bytes": "16MiB", "reconnect-seconds": "1s"} | settings
        flags = [f"--{key}={value}" for key, value in values.items()]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "prfaas.cli.agent", *flags], stderr=log)
        agent = RunningAgent(name, process, socket, wire, status)
        self._running.append(agent)
        wait_until(lambda: socket.exists() and _answers(status), seconds=20)
        return agent

    def stop(self) -> None:
        for engine in self._engines:
            engine.close()
        for agent in self._running:
            agent.process.terminate()
        for agent in self._running:
            assert agent.process.wait(15) in (0, -signal.SIGKILL)

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
            "expires_at": time.time() + 30.0,
        } | changes
        key = grants.derive_key(self.secret, "grant")
        return transfer_id, grants.sign(grants.Grant(**fields), key)  # type: ignore[arg-type]


def _answers(status: str) -> bool:
    try:
        return bool(get_json(f"http://{status}/healthz"))
    except OSError:
        return False


class Engine:
    """What a connector does, by hand: a scheduler and one worker."""

    def __init__(self, agent: RunningAgent, name: str, its_layout: Layout | None = None) -> None:
        self.worker = AgentClient(str(agent.socket), instance=name, role="worker", layout=its_layout or layout())
        self.scheduler = AgentClient(str(agent.socket), instance=name, role="scheduler")
        self._unread: list[Message] = []

    def wait(self, kind: type[Message] | tuple[type[Message], ...], *, seconds: float = 10.0) -> Message:
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

    def write_all(self, opened: SendOpened, *, seed: int = 0) -> None:
        num_blocks = len(opened.slots[0][0])
        for layer in (0, 1):
            self.write_layer(opened, 0, layer, blocks=range(num_blocks), seed=seed)
        self.write_layer(opened, 1, 0, blocks=range(1), seed=seed)
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
        self.worker.close()


def content(position: int, block: int, layer: int, seed: int) -> bytes:
    size = layout().groups[position].layers[layer].payload_bytes
    pattern = bytes((position * 7 + block * 13 + layer * 29 + seed + i) % 251 for i in range(997))
    return (pattern * (size // 997 + 1))[:size]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    made.stop()


def _chain(*, first: int = 0, length: int = NUM_TOKENS) -> HashChain:
    return HashChain(ROOT, range(first, first + length))


def _transfer(agents: Agents, west: RunningAgent, sender: Engine, receiver: Engine, chain: HashChain) -> ReceiveReady:
    transfer_id, grant = agents.grant("east", west, chain)
    groups = blocks(chain, chain.num_tokens)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(chain.num_tokens), groups))
    sender.scheduler.post(Send(transfer_id, grant, groups))
    opened = sender.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    sender.write_all(opened)
    sender.wait(TransferDone)
    sender.scheduler.post(Cancel(transfer_id))
    ready = receiver.wait(ReceiveReady)
    assert isinstance(ready, ReceiveReady)
    return ready


def test_layers_arrive_whole_and_slots_are_given_back(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    ready = _transfer(agents, west, sender, receiver, _chain())
    receiver.assert_content(ready)
    assert ready.generations[0][0] == [receiver.worker.slot_generations()[slot] for slot in ready.slots[0][0]]
    receiver.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] == 0)
    assert east.pool()["prefix"] == west.pool()["prefix"] == 7  # six full blocks and the state


def test_an_agent_that_nobody_can_dial_receives_over_connections_that_it_dials(agents: Agents) -> None:
    east = agents.start("east", **{"dialled-by": "west"})
    west = agents.start("west", **{"fetch-from": f"east={east.wire}"})
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    west.wire = free_address()  # what grants name refuses every connection
    ready = _transfer(agents, west, sender, receiver, _chain())
    receiver.assert_content(ready)
    assert get_json(f"http://{west.status}/status")["inlets"][0]["num_connections"] > 0


def test_only_what_the_receiver_lacks_crosses_the_wire(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    first = _transfer(agents, west, sender, receiver, _chain())
    receiver.scheduler.post(Release(first.transfer_id))
    longer = _chain(length=NUM_TOKENS + 64)
    second = _transfer(agents, west, sender, receiver, longer)
    receiver.assert_content(second)
    records = west.transfers()
    block, state = 12_000, 50_000
    assert records[0]["held_bytes"] == 0
    assert records[1]["held_bytes"] == 6 * block
    missing = 3 * block + state  # blocks 6, 7 and the partial 8, and the state of another length
    assert missing <= int(str(records[1]["wire_bytes"])) <= missing * 1.005 + 100


def test_a_claim_that_comes_after_the_data_is_served(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    opened = sender.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    sender.write_all(opened)
    sender.wait(TransferDone)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    ready = receiver.wait(ReceiveReady)
    assert isinstance(ready, ReceiveReady)
    receiver.assert_content(ready)


def _fails(receiver: Engine, *, reason: str, seconds: float = 10.0) -> None:
    failed = receiver.wait(TransferFailed, seconds=seconds)
    assert isinstance(failed, TransferFailed) and failed.reason == reason, failed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expires_at": 1.0}, "grant_refused"),
        ({"source": AgentName("elsewhere")}, "grant_refused"),
        ({"max_bytes": 1000}, "grant_refused"),
    ],
)
def test_a_send_without_a_good_grant_is_refused(agents: Agents, changes: dict[str, object], reason: str) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender = agents.engine(east, "e")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain, **changes)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    _fails(sender, reason=reason)
    assert east.pool()["transfer"] == 0


def test_another_prompt_than_the_granted_one_is_refused_on_both_sides(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain, other = _chain(), _chain(first=5000)
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, other.at(NUM_TOKENS), blocks(other, NUM_TOKENS)))
    _fails(receiver, reason="prompt_mismatch")
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    _fails(sender, reason="cancelled")


def test_a_sender_whose_engine_dies_fails_the_receiver(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    opened = sender.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    sender.write_layer(opened, 0, 0, blocks=range(3))
    sender.close()
    _fails(receiver, reason="incomplete")
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] == 0)


def test_a_request_that_ends_before_its_layers_came_fails_the_receiver(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    sender.scheduler.post(Cancel(transfer_id))
    _fails(receiver, reason="incomplete")
    _fails(sender, reason="incomplete")
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] == 0)


def test_a_killed_sending_agent_fails_the_receiver_within_the_reconnect_time(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    opened = sender.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    sender.write_layer(opened, 0, 0, blocks=range(3))
    wait_until(lambda: west.pool().get("transfer", 0) > 0)
    east.process.kill()
    _fails(receiver, reason="unreachable", seconds=8)
    wait_until(lambda: west.pool()["transfer"] == 0)
    wait_until(lambda: sender.scheduler.poll(0.01) == [] and not sender.scheduler.connected)


def test_a_link_that_comes_back_in_time_lets_the_transfer_go_on(agents: Agents) -> None:
    east, west = (
        agents.start("east", **{"reconnect-seconds": "20s"}),
        agents.start("west", **{"reconnect-seconds": "20s"}),
    )
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    with Relay(west.wire) as link:
        transfer_id, grant = agents.grant("east", west, chain, destination_address=link.address)
        receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
        sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
        opened = sender.wait(SendOpened)
        assert isinstance(opened, SendOpened)
        wait_until(lambda: west.pool().get("transfer", 0) > 0)
        link.cut_after(30_000)
        sender.write_all(opened)
        wait_until(lambda: link.is_cut)
        link.mend()
        ready = receiver.wait(ReceiveReady)
        assert isinstance(ready, ReceiveReady)
        receiver.assert_content(ready)
        sender.wait(TransferDone)


def test_memory_that_does_not_suffice_is_refused_by_reason(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west", **{"pool-bytes": "300KiB"})
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    _fails(sender, reason="no_memory")
    _fails(receiver, reason="no_memory")


def test_unequal_layouts_are_refused_at_the_transfer_with_what_differs(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w", layout(dtype="bfloat16"))
    chain = _chain()
    transfer_id, grant = agents.grant("east", west, chain)
    receiver.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), blocks(chain, NUM_TOKENS)))
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    failed = sender.wait(TransferFailed)
    assert isinstance(failed, TransferFailed) and failed.reason == "layout_mismatch"
    assert "dtype: bfloat16 here, float32 there" in failed.message
    _fails(receiver, reason="layout_mismatch")


@pytest.mark.parametrize(
    ("theirs", "named"),
    [(layout(dtype="bfloat16"), "dtype"), (layout(shard_size=2), "tensor-parallel size: 1 here, 2 there")],
)
def test_an_unequal_layout_is_refused_when_it_attaches_at_a_peer_of_a_configured_agent(
    agents: Agents, theirs: Layout, named: str
) -> None:
    west = agents.start("west")
    east = agents.start("east", peers=f"west={west.wire}")
    receiver = agents.engine(west, "w")
    with pytest.raises(LayoutError, match=named):
        agents.engine(east, "e", theirs)
    agents.engine(east, "e2").close()
    receiver.close()


def test_an_unequal_layout_is_refused_beside_a_living_engine_of_the_same_agent(agents: Agents) -> None:
    west = agents.start("west")
    first = agents.engine(west, "a")
    with pytest.raises(LayoutError, match="a runs this model too: layer a0 dtype: float32 here, bfloat16 there"):
        agents.engine(west, "b", layout(dtype="bfloat16"))
    first.close()


def test_a_lossy_agent_refuses_an_engine_whose_attention_it_could_not_cast(agents: Agents) -> None:
    west = agents.start("west", **{"lossy-fp8": "true"})
    with pytest.raises(LayoutError, match="layer a0 dtype: float32; lossy_fp8 is set"):
        agents.engine(west, "a")
    agents.engine(west, "b", layout(dtype="bfloat16")).close()


def test_nobody_at_the_socket_is_said_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match=r"no agent listens at .*nowhere\.sock"):
        AgentClient(str(tmp_path / "nowhere.sock"), instance="x", role="scheduler")


def test_an_agent_of_another_secret_is_not_served(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    strangers = Agents(tmp_path / "other")
    east, west = strangers.start("east"), agents.start("west")
    sender = agents.engine(east, "e")
    chain = _chain()
    transfer_id, grant = strangers.grant("east", west, chain)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    _fails(sender, reason="unreachable")
    assert west.transfers() == []
    strangers.stop()


def _tls(authority: Authority, name: str) -> dict[str, str]:
    its = authority.issue(name)
    files = {"authority": its.authority, "certificate": its.certificate, "key": its.key, "revocations": its.revocations}
    return {f"tls-{kind}": str(path) for kind, path in files.items()}


def test_agents_with_certificates_encrypt_what_they_send_and_refuse_who_has_none(
    agents: Agents, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    west = agents.start("west", **_tls(authority, "west"))
    east = agents.start("east", **_tls(authority, "east"))
    receiver = agents.engine(west, "w")
    receiver.assert_content(_transfer(agents, west, agents.engine(east, "e"), receiver, _chain()))
    bare = agents.start("bare")
    sender, chain = agents.engine(bare, "b"), _chain(first=7000)
    transfer_id, grant = agents.grant("bare", west, chain)
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain, NUM_TOKENS)))
    sender.wait(SendOpened)
    _fails(sender, reason="unreachable")
    with urllib.request.urlopen(f"http://{west.status}/metrics", timeout=10) as page:
        refusals = [line for line in page.read().decode().splitlines() if 'reason="tls_none"' in line]
    assert any(float(line.split()[-1]) > 0 for line in refusals)

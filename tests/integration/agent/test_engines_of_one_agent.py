"""Several engines beside one agent, some of which misbehave, do not disturb each other."""

import asyncio
import contextlib
import dataclasses
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Cancel,
    LookedUp,
    Lookup,
    Receive,
    ReceiveReady,
    Release,
    Send,
    SendOpened,
    TransferDone,
    encode,
)
from prfaas.agent.engine.server import MAX_QUEUED_MESSAGES, EngineCallbacks, EngineConnection, EngineListener
from prfaas.errors import LayoutError
from prfaas.kv.layout import Layout
from prfaas.types import AgentName, TransferId
from tests.support.agents import NUM_TOKENS, ROOT, Agents, Engine, RunningAgent, blocks, chain_of, layout
from tests.support.waiting import PATIENCE_SECONDS, until, wait_until


@pytest.fixture
def node(agents: Agents) -> RunningAgent:
    return agents.start("node")


def _begin(agents: Agents, node: RunningAgent) -> tuple[TransferId, Engine, Engine, SendOpened]:
    """Begin a transfer from one engine of the node to another."""
    prefill, decode, chain = agents.engine(node, "p"), agents.engine(node, "d"), chain_of()
    transfer_id, grant = agents.grant("node", node, chain)
    decode.claim(transfer_id, grant, chain)
    opened = prefill.open_send(transfer_id, grant, chain)
    return transfer_id, prefill, decode, opened


def _count(node: RunningAgent, what: str) -> int:
    return int(node.status_page()[what])


def test_reader_that_gives_up_leaves_the_writer_its_slots(agents: Agents, node: RunningAgent) -> None:
    transfer_id, prefill, decode, _ = _begin(agents, node)
    wait_until(lambda: _count(node, "receiving") == 1)
    decode.scheduler.post(Cancel(transfer_id))
    prefill.fails("cancelled")
    wait_until(lambda: _count(node, "receiving") == 0)
    assert _count(node, "sending") == 1, "its worker may still write"
    prefill.scheduler.post(Cancel(transfer_id))
    wait_until(lambda: _count(node, "sending") == 0 == node.pool()["transfer"])


def test_an_engine_attaches_though_no_memory_lies_near_its_device(
    node: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    client = AgentClient(str(node.socket), instance="e", role="worker", layout=layout(), node=1000)
    assert client.connected
    client.close()
    assert "arena.node_not_preferred node=1000 error=" in caplog.text


def test_release_does_not_end_an_outbound_transfer(agents: Agents, node: RunningAgent) -> None:
    transfer_id, prefill, _, opened = _begin(agents, node)
    prefill.scheduler.post(Release(transfer_id))
    prefill.write_all(opened)
    prefill.wait(TransferDone)


def test_requests_before_workers_attach_are_answered_afterwards(agents: Agents, node: RunningAgent) -> None:
    """Schedulers attach first after a restart of the agent."""
    chain, listed = chain_of(), blocks(chain_of(), NUM_TOKENS)
    transfer_id, grant = agents.grant("node", node, chain)
    prefill = agents.engine(node, "p", attaches_workers=False)
    decode = agents.engine(node, "d", attaches_workers=False)
    decode.scheduler.post(Receive(transfer_id, grant, chain.at(NUM_TOKENS), listed))
    prefill.scheduler.post(Send(transfer_id, grant, listed))
    for engine in (prefill, decode):
        engine.scheduler.post(Lookup(TransferId(os.urandom(16)), ROOT, b"", 1))
        # Now the agent has read the request before the lookup, and has not refused it.
        engine.wait(LookedUp)
        engine.attach_workers()
    opened = prefill.wait(SendOpened)
    prefill.write_all(opened)
    ready = decode.wait(ReceiveReady)
    decode.assert_content(ready)


def test_request_cancelled_before_workers_attach_never_starts(agents: Agents, node: RunningAgent) -> None:
    chain, listed = chain_of(), blocks(chain_of(), NUM_TOKENS)
    transfer_id, grant = agents.grant("node", node, chain)
    prefill = agents.engine(node, "p", attaches_workers=False)
    prefill.scheduler.post(Send(transfer_id, grant, listed))
    prefill.scheduler.post(Cancel(transfer_id))
    prefill.scheduler.post(Lookup(TransferId(os.urandom(16)), ROOT, b"", 1))
    prefill.wait(LookedUp)
    prefill.attach_workers()
    prefill.scheduler.post(Lookup(TransferId(os.urandom(16)), ROOT, b"", 1))
    # No answer to Send comes first.
    prefill.wait(LookedUp)
    assert _count(node, "sending") == 0


def test_second_engine_with_the_same_name_is_refused(agents: Agents) -> None:
    node = agents.start("node")
    first = AgentClient(str(node.socket), instance="e", role="worker", layout=layout())
    other_layout = dataclasses.replace(layout(), model="another")
    with contextlib.closing(first), pytest.raises(LayoutError, match="instance e rank 0 is attached already"):
        AgentClient(str(node.socket), instance="e", role="worker", layout=other_layout)


async def test_engine_that_reads_no_messages_is_disconnected(tmp_path: Path) -> None:
    def attach_engine(attach: Attach, engine_layout: Layout | None) -> tuple[Attached, tuple[()]]:
        return Attached(AgentName("node"), 0, 0, 0, 1), ()

    lost: list[EngineConnection] = []

    def ignore(*arguments: object) -> None:
        pass

    callbacks = EngineCallbacks(attach_engine, ignore, ignore, ignore, lost.append)
    listener = EngineListener(tmp_path / "node.sock", callbacks)
    await listener.start()
    stuck = await asyncio.to_thread(AgentClient, str(tmp_path / "node.sock"), instance="stuck", role="scheduler")
    await until(lambda: listener.connections)
    engine = listener.connections[0]
    for _ in range(MAX_QUEUED_MESSAGES + 1):
        engine.post(TransferDone(TransferId(bytes(16))))
    await until(lambda: lost == [engine])
    assert listener.connections == []
    stuck.close()
    await listener.close()


@pytest.fixture
def descriptor_limit() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_engine_attaches_once_the_agent_has_descriptors_again(
    agents: Agents, node: RunningAgent, descriptor_limit: tuple[int, int]
) -> None:
    witness = agents.engine(node, "witness")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        late.settimeout(PATIENCE_SECONDS)
        held = [os.dup(0)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, descriptor_limit[1]))
        # Use up every descriptor.
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        late.connect(str(node.socket))
        # After three answers the agent has tried to accept the late engine.
        for _ in range(3):
            witness.scheduler.post(Lookup(TransferId(os.urandom(16)), ROOT, b"", 1))
            witness.wait(LookedUp)
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptor_limit)
        for descriptor in held:
            os.close(descriptor)
        late.sendall(encode(Attach(PROTOCOL_VERSION, "late", "scheduler", 0, None)))
        assert late.recv(1 << 10)

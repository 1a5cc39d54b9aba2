"""An engine's client beside an agent that refuses, hangs, or sends nonsense."""

import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from prfaas.agent.engine.client import REATTACH_INTERVAL_SECONDS, AgentClient
from prfaas.agent.engine.protocol import Attached, Lookup, Message, MessageBuffer, Refused, encode
from prfaas.errors import AgentUnreachable
from prfaas.types import BlockHash, TransferId
from tests.support.agents import layout
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ATTACHED = Attached("west", num_slots=0, slot_bytes=0, header_bytes=0)


class Listener:
    """Fake agent that answers one engine at a time as told, and reads nothing afterwards."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "agent.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._socket.listen()
        self._thread = ThreadPoolExecutor(1)

    def answer(self, message: Message, *descriptors: int) -> Future[socket.socket]:
        """Answer the next engine that connects; return its connection."""
        return self._thread.submit(self._answer, message, *descriptors)

    def _answer(self, message: Message, *descriptors: int) -> socket.socket:
        connection, _ = self._socket.accept()
        buffer = MessageBuffer()
        while not buffer.feed(connection.recv(1 << 16)):
            pass
        socket.send_fds(connection, [encode(message)], descriptors)
        return connection

    def attached(self) -> tuple[AgentClient, socket.socket]:
        """Return an attached scheduler and the agent's end of its connection."""
        answered = self.answer(ATTACHED)
        return AgentClient(self.path, instance="engine", role="scheduler"), answered.result(PATIENCE_SECONDS)

    def close(self) -> None:
        self._socket.close()
        self._thread.shutdown()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path)
    yield made
    made.close()


def test_refusal_is_logged_once_and_the_old_arena_kept(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    client, connection = listener.attached()
    connection.close()
    left: list[str] = []
    tried_at = [0.0]

    def try_again() -> bool:
        tried_at.append(time.monotonic())
        return client.reattach(lambda: left.append("old"))

    for _ in range(2):
        answered = listener.answer(Refused("block 3 differs"))
        wait_until(lambda: try_again() or answered.done())  # noqa: B023
        answered.result(PATIENCE_SECONDS).close()
    assert caplog.text.count("block 3 differs") == 1 and left == []
    answered = listener.answer(ATTACHED)
    is_tried = try_again() or answered.done()
    assert not is_tried or time.monotonic() - tried_at[-2] > REATTACH_INTERVAL_SECONDS, "a step later is too early"
    wait_until(try_again)
    assert client.connected and left == ["old"]
    client.close()
    answered.result(PATIENCE_SECONDS).close()


def test_hanging_agent_is_asked_once_and_its_late_answer_used(listener: Listener) -> None:
    client, connection = listener.attached()
    connection.close()
    wait_until(lambda: not client.poll() and not client.connected, what="the loss")
    assert [client.reattach() for _ in range(1000)] == [False] * 1000
    # The listener accepts only one connection, so the first must still be waiting.
    answered = listener.answer(ATTACHED)
    wait_until(client.reattach, what="the agent that answers late")
    assert client.connected
    client.close()
    answered.result(PATIENCE_SECONDS).close()


def test_agent_that_reads_no_messages_is_disconnected(listener: Listener) -> None:
    client, connection = listener.attached()
    message = Lookup(TransferId(bytes(16)), BlockHash(bytes(16)), bytes(1 << 20), 16)
    for _ in range(100):
        client.post(message)
    assert not client.connected
    client.close()
    connection.close()


def test_agent_that_sends_nonsense_is_disconnected(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    client, connection = listener.attached()
    connection.sendall(b"\xff" * 64)
    wait_until(lambda: client.poll(0.01) or not client.connected, what="the loss")
    assert "agent.lost" in caplog.text
    client.close()
    connection.close()


def test_worker_that_cannot_map_the_pool_keeps_no_descriptors(listener: Listener) -> None:
    arena = os.memfd_create("arena")
    # No process can address so much.
    os.ftruncate(arena, 1 << 56)
    # The pipe replaces ring and event: its read end reports when all copies of the write end are closed.
    watched, kept = os.pipe()
    answered = listener.answer(ATTACHED, arena, kept, kept)
    with pytest.raises(AgentUnreachable, match="cannot be mapped"):
        AgentClient(listener.path, instance="engine", role="worker", layout=layout())
    answered.result(PATIENCE_SECONDS).close()
    os.close(arena)
    os.close(kept)
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    assert poller.poll(0) == [(watched, select.POLLHUP)]
    os.close(watched)


def test_client_works_with_descriptors_above_1023(listener: Listener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip("needs a limit of 1,100 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    sockets = [socket.socket() for _ in range(1030)]
    try:
        client, connection = listener.attached()
        assert client.poll(0.001) == [] and client.connected
        client.close()
        connection.close()
    finally:
        for open_socket in sockets:
            open_socket.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

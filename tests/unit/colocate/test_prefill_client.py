"""Prefill workers that die or freeze, as the decode engine sees them: at a real socket, with this test as the worker."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.colocate.channel import SOCKET_VARIABLE, Channel, ChannelServer
from prfaas.colocate.messages import Done, PrefillHello, Ready, UseCores
from prfaas.colocate.prefill_client import MAX_DEATHS, SILENCE_SECONDS, START_SECONDS, PrefillClient
from prfaas.colocate.prefill_plan import Order

_NO_PROCESS = 1 << 30  # This test is the worker, and is not to be killed.


class Clock:
    """Clock that stands still until a test advances it."""

    def __init__(self) -> None:
        self._seconds = 100.0

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChannelServer]:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "fork-server"))
    server = ChannelServer(tmp_path / "fork-server")
    yield server
    server.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(server: ChannelServer, clock: Clock) -> Iterator[PrefillClient]:
    client = PrefillClient(PrefillHello(None, 4096, ()), clock=clock)
    yield client
    client.close()


def _worker(server: ChannelServer, client: PrefillClient) -> Channel:
    """Start the next worker, up to its first orders."""
    worker = server.accept()
    worker.receive()
    worker.send(Ready(_NO_PROCESS))
    client.take_finished()
    assert isinstance(worker.receive(), UseCores)
    return worker


def _order(name: str) -> Order:
    return Order(name, (1, 2, 3), 0, 2, ((1,),))


def test_the_next_worker_gets_the_orders_that_the_dead_one_did_not_finish(
    server: ChannelServer, client: PrefillClient
) -> None:
    for name in ("a", "b"):
        client.add(_order(name))
    client.flush((0,))
    worker = _worker(server, client)
    worker.send(Done(worker.receive().request_id))
    assert client.take_finished() == {"a"}
    worker.close()
    assert client.take_finished() == set()
    assert _worker(server, client).receive() == _order("b")


def test_an_order_is_refused_after_too_many_deaths_and_later_ones_are_not(
    server: ChannelServer, client: PrefillClient
) -> None:
    client.add(_order("poison"))
    client.flush((0,))
    for _ in range(MAX_DEATHS):
        assert not client.take_refused()
        worker = _worker(server, client)
        worker.receive()
        worker.close()
        client.take_finished()
    busy_until_taken = [client.is_busy, client.take_refused(), client.is_busy]
    assert busy_until_taken == [True, {"poison"}, False]
    client.add(_order("good"))
    client.flush((0,))
    assert _worker(server, client).receive() == _order("good")


def test_a_worker_that_cannot_start_is_replaced_for_orders_only(server: ChannelServer, client: PrefillClient) -> None:
    client.flush((0,))
    server.accept().close()
    client.take_finished()
    client.flush((0,))
    client.add(_order("a"))
    client.flush((0,))
    assert client.num_deaths == 1
    assert _worker(server, client).receive() == _order("a")


def test_a_cancelled_order_ends_with_the_worker(server: ChannelServer, client: PrefillClient) -> None:
    client.add(_order("a"))
    client.flush((0,))
    worker = _worker(server, client)
    client.cancel("a")
    client.flush((0,))
    worker.close()
    assert client.take_finished() == {"a"}


def _frozen_worker(server: ChannelServer, client: PrefillClient) -> int:
    """Start a process as the next worker. It stops itself, with its first messages unread."""
    process = os.fork()
    if process == 0:
        worker = server.accept()
        worker.receive()
        worker.send(Ready(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    os.waitpid(process, os.WUNTRACED)
    client.take_finished()
    return process


def test_a_frozen_worker_is_killed_and_the_next_one_gets_its_orders(
    server: ChannelServer, client: PrefillClient, clock: Clock
) -> None:
    client.add(_order("a"))
    client.flush((0,))
    process = _frozen_worker(server, client)
    clock.advance(SILENCE_SECONDS)
    client.flush((0,))
    client.take_finished()
    assert os.waitpid(process, os.WNOHANG) == (0, 0)
    clock.advance(0.1)
    client.take_finished()
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    client.take_finished()
    assert _worker(server, client).receive() == _order("a")


@pytest.mark.parametrize(("number", "tokens"), [(200, 4_000), (2, 400_000)])
def test_a_frozen_worker_with_a_full_socket_does_not_block_the_engine(
    server: ChannelServer, client: PrefillClient, clock: Clock, number: int, tokens: int
) -> None:
    process = _frozen_worker(server, client)
    for name in range(number):
        client.add(Order(str(name), tuple(range(tokens)), 0, tokens - 1, ((1,),)))
    client.flush((0,))
    clock.advance(SILENCE_SECONDS + 0.1)
    client.take_finished()
    os.waitpid(process, 0)
    client.take_finished()
    assert client.num_deaths == 1 and client.is_busy


def test_a_worker_that_answers_pings_keeps_a_long_order(
    server: ChannelServer, client: PrefillClient, clock: Clock
) -> None:
    worker = _worker(server, client)
    client.add(_order("a"))
    for _ in range(10):
        clock.advance(1.0)
        client.flush((0,))
        messages = [worker.receive()]
        while worker.has_message():
            messages.append(worker.receive())
        worker.send(messages[-1])
        assert client.take_finished() == set()
    assert client.num_deaths == 0 and client.is_busy


def test_decode_computes_prompts_while_no_worker_starts(
    server: ChannelServer, client: PrefillClient, clock: Clock
) -> None:
    client.add(_order("a"))
    client.flush((0,))
    assert client.take_finished() == set() and client.accepts_orders()
    clock.advance(SILENCE_SECONDS + 0.1)
    client.take_finished()
    assert client.take_refused() == {"a"} and not client.accepts_orders()
    _worker(server, client)
    assert client.accepts_orders()


def test_a_start_that_takes_too_long_is_tried_again_and_said(
    server: ChannelServer, client: PrefillClient, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = server.accept()
    clock.advance(START_SECONDS + 0.1)
    client.flush((0,))
    hanging.receive()
    with pytest.raises(EOFError):
        hanging.receive()
    _worker(server, client)
    assert client.accepts_orders() and "prefill_worker.late" in caplog.text


def test_without_a_fork_server_prompts_are_refused_and_nothing_blocks(
    server: ChannelServer, client: PrefillClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(server, client)
    monkeypatch.setenv(SOCKET_VARIABLE, "/none")
    worker.close()
    client.add(_order("a"))
    client.flush((0,))
    clock.advance(SILENCE_SECONDS + 0.1)
    client.flush((0,))
    client.take_finished()
    assert client.take_refused() == {"a"}

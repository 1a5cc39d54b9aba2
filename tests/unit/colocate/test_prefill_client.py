"""Deaths of prefill workers, as the decode engine sees them: at a real socket, with this test as the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.colocate.channel import SOCKET_VARIABLE, Channel, ChannelServer
from prfaas.colocate.messages import Done, PrefillHello, Ready, UseCores
from prfaas.colocate.prefill_client import MAX_DEATHS, PrefillClient
from prfaas.colocate.prefill_plan import Order


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChannelServer]:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "fork-server"))
    server = ChannelServer(tmp_path / "fork-server")
    yield server
    server.close()


@pytest.fixture
def client(server: ChannelServer) -> Iterator[PrefillClient]:
    client = PrefillClient(PrefillHello(None, 4096, ()))
    yield client
    client.close()


def _worker(server: ChannelServer, client: PrefillClient) -> Channel:
    """Start the next worker, up to its first orders."""
    worker = server.accept()
    worker.receive()
    worker.send(Ready(1))
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
    assert client.take_finished(5.0) == {"a"}
    worker.close()
    assert client.take_finished(5.0) == set()
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
        client.take_finished(5.0)
    busy_until_taken = [client.is_busy, client.take_refused(), client.is_busy]
    assert busy_until_taken == [True, {"poison"}, False]
    client.add(_order("good"))
    client.flush((0,))
    assert _worker(server, client).receive() == _order("good")


def test_a_worker_that_cannot_start_is_replaced_for_orders_only(server: ChannelServer, client: PrefillClient) -> None:
    client.flush((0,))
    server.accept().close()
    client.take_finished(5.0)
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
    assert client.take_finished(5.0) == {"a"}

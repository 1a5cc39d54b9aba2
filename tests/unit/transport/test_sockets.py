"""Options and addresses of sockets, and unencrypted streams over a socket that moves only a few bytes at a time."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES
from prfaas.transport.net.sockets import (
    RECEIVE_STEP_BYTES,
    SEND_SECONDS,
    PlainStream,
    make_socket,
    public_address,
    tune,
)
from tests.support.waiting import PATIENCE_SECONDS

FEW_BYTES = 1000


class _Reluctant(socket.socket):
    """Takes and gives a few bytes at a time."""

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        return self.send(b"".join(buffers)[:FEW_BYTES])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(buffer, min(FEW_BYTES, len(buffer)), flags)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with _Reluctant(fileno=near.detach()) as reluctant, far:
        yield reluctant, far


@contextlib.contextmanager
def _beside(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    "lengths", [(1,), (5 * FEW_BYTES, 7, 3 * FEW_BYTES), (RECEIVE_STEP_BYTES + 5, RECEIVE_STEP_BYTES)]
)
def test_all_bytes_are_sent_in_order(pair: tuple[socket.socket, socket.socket], lengths: tuple[int, ...]) -> None:
    near, far = pair
    sent = [os.urandom(length) for length in lengths]
    received = bytearray(sum(lengths))
    with _beside(lambda: far.recv_into(received, len(received), socket.MSG_WAITALL)):
        PlainStream(near).send(sent, within_seconds=PATIENCE_SECONDS)
    assert received == b"".join(sent)


@pytest.mark.parametrize(
    "lengths", [(1,), (5 * FEW_BYTES,), (10, 7, 20), (3 * RECEIVE_STEP_BYTES + 5,), (RECEIVE_STEP_BYTES,) * 2]
)
def test_views_are_filled_in_order_and_the_next_byte_wakes_the_reader(
    pair: tuple[socket.socket, socket.socket], lengths: tuple[int, ...]
) -> None:
    near, far = pair
    sent = os.urandom(sum(lengths))
    parts = [bytearray(length) for length in lengths]
    with _beside(lambda: far.sendall(sent)):
        PlainStream(near).receive([memoryview(part) for part in parts], within_seconds=PATIENCE_SECONDS)
    assert b"".join(parts) == sent
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_a_peer_that_closes_within_a_frame_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.sendall(b"half")
    far.close()
    with pytest.raises(ConnectionResetError):
        PlainStream(near).receive([memoryview(bytearray(8))], within_seconds=PATIENCE_SECONDS)


def test_a_frame_that_takes_too_long_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.sendall(bytes(2 * FEW_BYTES))
    with pytest.raises(TimeoutError):
        PlainStream(near).receive([memoryview(bytearray(2 * FEW_BYTES))], within_seconds=-1.0)
    with pytest.raises(TimeoutError):
        PlainStream(near).send([bytes(2 * FEW_BYTES)], within_seconds=-1.0)


@pytest.mark.parametrize("address", ["8.8.8.8:7000", "[2001:4860:4860::8888]:7000"])
def test_a_public_address_is_not_dialled_without_consent(address: str) -> None:
    with pytest.raises(ConfigError, match="is public; set tls"):
        make_socket(address, congestion_control="bbr", allow_public=False)


def test_a_malformed_address_is_named() -> None:
    with pytest.raises(ConfigError, match="'nowhere' is not host:port"):
        make_socket("nowhere", congestion_control="bbr", allow_public=True)


@pytest.mark.parametrize(
    ("host", "is_public"), [("127.0.0.1", False), ("10.0.0.1", False), ("::", True), ("0.0.0.0", True)]
)
def test_binding_to_every_address_counts_as_public(host: str, is_public: bool) -> None:
    assert public_address(host) == (host if is_public else None)


def test_a_kernel_without_the_congestion_control_keeps_its_own() -> None:
    with socket.socket() as made:
        default = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        tune(made, congestion_control="no such thing")
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == default
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SEND_SECONDS * 1000
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOT_SENT_LOW_WATER_BYTES

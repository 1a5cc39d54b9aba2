"""Bytes as they are, over a socket that takes and gives as many at a time as it likes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from prfaas.transport.net.sockets import RECEIVE_STEP_BYTES, PlainStream
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
    ours, theirs = socket.socketpair()
    with _Reluctant(fileno=ours.detach()) as reluctant, theirs:
        yield reluctant, theirs


@contextlib.contextmanager
def _beside(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    "lengths", [(1,), (5 * FEW_BYTES, 7, 3 * FEW_BYTES), (RECEIVE_STEP_BYTES + 5, RECEIVE_STEP_BYTES)]
)
def test_all_that_is_sent_comes_in_order(pair: tuple[socket.socket, socket.socket], lengths: tuple[int, ...]) -> None:
    ours, theirs = pair
    sent = [os.urandom(length) for length in lengths]
    received = bytearray(sum(lengths))
    with _beside(lambda: theirs.recv_into(received, len(received), socket.MSG_WAITALL)):
        PlainStream(ours).send(sent, within_seconds=PATIENCE_SECONDS)
    assert received == b"".join(sent)


@pytest.mark.parametrize(
    "lengths", [(1,), (5 * FEW_BYTES,), (10, 7, 20), (3 * RECEIVE_STEP_BYTES + 5,), (RECEIVE_STEP_BYTES,) * 2]
)
def test_views_are_filled_in_order_and_the_next_byte_wakes_its_reader(
    pair: tuple[socket.socket, socket.socket], lengths: tuple[int, ...]
) -> None:
    ours, theirs = pair
    sent = os.urandom(sum(lengths))
    parts = [bytearray(length) for length in lengths]
    with _beside(lambda: theirs.sendall(sent)):
        PlainStream(ours).receive([memoryview(part) for part in parts], within_seconds=PATIENCE_SECONDS)
    assert b"".join(parts) == sent
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_a_peer_that_goes_within_a_frame_is_no_end_of_it(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"half")
    theirs.close()
    with pytest.raises(ConnectionResetError):
        PlainStream(ours).receive([memoryview(bytearray(8))], within_seconds=PATIENCE_SECONDS)


def test_a_frame_that_is_not_done_in_its_time_ends_with_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(bytes(2 * FEW_BYTES))
    with pytest.raises(TimeoutError):
        PlainStream(ours).receive([memoryview(bytearray(2 * FEW_BYTES))], within_seconds=-1.0)
    with pytest.raises(TimeoutError):
        PlainStream(ours).send([bytes(2 * FEW_BYTES)], within_seconds=-1.0)

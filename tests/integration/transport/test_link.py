"""Transfers over real sockets: every byte arrives, or the transfer fails with a reason."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from prfaas.transport.net.connection import Connection
from prfaas.transport.net.sockets import read_tcp_info
from prfaas.transport.protocol.wire import ConnectionState
from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveFailed, ReceiveMemoryFree, Rejection
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendFailed
from tests.support.transport_ends import GIVES_UP_SECONDS, Far, Near, make_far, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.corruption import flip_byte_in_first_chunk
from tools.link import LinkShape, Relay


def test_objects_arrive_whole_and_every_byte_is_acknowledged(far: Far, near_to: Callable[..., Near]) -> None:
    near, objects = near_to(far.address), objects_of(1, 70_000, 3_000_000)
    transfer_id = send(near, objects)
    end = near.assert_completed(transfer_id)
    assert end.stats.checksum_failures == 0
    assert far.contents(transfer_id) == objects
    assert end.stats.wire_bytes >= sum(map(len, objects))
    wait_until(lambda: len(far.of(ReceiveMemoryFree)) == 1)
    assert [type(event) for event in far.events] == [ReceiveCompleted, ReceiveMemoryFree]
    accepted = near.of(SendAccepted)[0]
    assert isinstance(accepted, SendAccepted) and accepted.missing_bytes == sum(map(len, objects))
    wait_until(lambda: near.link.snapshot().unacknowledged_bytes == 0)
    assert near.link.snapshot().acknowledged_bytes == sum(map(len, objects))


def test_layers_leave_while_others_are_not_ready_yet(far: Far, near_to: Callable[..., Near]) -> None:
    near, objects = near_to(far.address), objects_of(200_000, 200_000)
    transfer_id = send(near, objects, ready=False)
    near.link.ready(transfer_id, first_object=0, num_objects=2, offset_bytes=0, length_bytes=100_000)
    wait_until(lambda: 200_000 in near.acknowledged())
    assert not near.of(SendCompleted)
    near.link.ready(transfer_id, first_object=0, num_objects=2, offset_bytes=100_000, length_bytes=100_000)
    near.assert_completed(transfer_id)
    assert far.contents(transfer_id) == objects


def test_objects_that_the_receiver_holds_do_not_travel(far: Far, near_to: Callable[..., Near]) -> None:
    far.held = {0, 2}
    near, objects = near_to(far.address), objects_of(50_000, 60_000, 70_000)
    transfer_id = send(near, objects)
    end = near.assert_completed(transfer_id)
    assert 60_000 <= end.stats.wire_bytes < 61_000
    assert [any(item) for item in far.memory[transfer_id]] == [False, True, False]


def test_transfer_without_objects_is_accepted_or_rejected(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    near.assert_completed(send(near, []))
    far.reject = Rejection("layout_mismatch", "dtype differs")
    end = near.end(send(near, []))
    assert isinstance(end, SendFailed) and (end.reason, end.message) == ("layout_mismatch", "dtype differs")


def test_lasting_cut_fails_both_ends_and_frees_their_memory(near_to: Callable[..., Near]) -> None:
    far = make_far(silence_seconds=GIVES_UP_SECONDS)
    with Relay(far.address, LinkShape(bytes_per_second=2e6)) as relay:
        near = near_to(relay.address, silence_seconds=2 * GIVES_UP_SECONDS)
        relay.cut_after(300_000)
        near.assert_failed(send(near, objects_of(2_000_000)), "unreachable")
        wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
        failed = far.of(ReceiveFailed)[0]
        assert isinstance(failed, ReceiveFailed) and failed.reason == "unreachable" and failed.peer_name == "near"
    far.receiver.close()


def test_transfer_fails_after_a_chunk_was_damaged_three_times(far: Far, near_to: Callable[..., Near]) -> None:
    with Relay(far.address) as relay:
        relay.filter(flip_byte_in_first_chunk)
        near = near_to(relay.address)
        near.assert_failed(send(near, objects_of(100_000)), "checksum")
        wait_until(lambda: bool(far.of(ReceiveFailed)))
        failed = far.of(ReceiveFailed)[0]
        assert isinstance(failed, ReceiveFailed) and "3 times" in failed.message


class _FailsOnce(list[Any]):
    """List of events whose second append fails, as a bug of a listener would."""

    def append(self, event: Any) -> None:
        is_first = not self
        super().append(event)
        assert not is_first, "an event is not accepted"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_connection_whose_reader_crashed_is_replaced(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address, num_connections=1)
    near.events = _FailsOnce()
    near.assert_completed(send(near, objects_of(100_000)))


def test_transfer_that_is_never_ready_ends_at_its_deadline(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    near.assert_completed(send(near, objects_of(10)))
    near.assert_failed(send(near, objects_of(10), deadline=0.5, ready=False), "deadline")
    wait_until(lambda: len(far.of(ReceiveMemoryFree)) == len(far.memory))


def test_either_end_may_cancel(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    first = send(near, objects_of(10), ready=False)
    wait_until(lambda: bool(near.of(SendAccepted)))
    near.link.cancel(first, "cancelled", "no longer wanted")
    wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
    second = send(near, objects_of(10), ready=False)
    wait_until(lambda: len(near.of(SendAccepted)) == 2)
    far.receiver.cancel(second, "cancelled", "no longer wanted")
    end = near.end(second)
    assert isinstance(end, SendFailed) and end.message == "no longer wanted"


def test_peer_with_another_secret_or_name_is_unreachable(far: Far, near_to: Callable[..., Near]) -> None:
    for settings in ({"key": b"x" * 32}, {"peer": "somebody else"}):
        near = near_to(far.address, silence_seconds=GIVES_UP_SECONDS, **settings)
        near.assert_failed(send(near, objects_of(10)), "unreachable")
    assert far.events == []


class _SlowToWrite(socket.socket):
    """Socket whose writer is delayed before its system call until the socket was shut down, and longer."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__(fileno=made.detach())
        self.is_writing, self.is_shut, self.was_open = threading.Event(), threading.Event(), False

    def shutdown(self, how: int) -> None:
        super().shutdown(how)
        self.is_shut.set()

    def sendmsg(self, *message: Any) -> int:
        self.is_writing.set()
        assert self.is_shut.wait(PATIENCE_SECONDS)
        for _ in range(20):
            time.sleep(0.01)
            self.was_open = self.fileno() != -1
        return super().sendmsg(*message)


def test_connection_stays_open_while_a_thread_writes() -> None:
    near_end, far_end = socket.socketpair()
    slow = _SlowToWrite(near_end)
    connection = Connection(slow, state=ConnectionState.RECEIVING)
    with far_end:
        writer = threading.Thread(target=connection.try_write, args=(b"a frame",))
        writer.start()
        assert slow.is_writing.wait(PATIENCE_SECONDS)
        connection.close()
        writer.join()
    assert slow.was_open and slow.fileno() == -1


def test_kernel_counts_received_segments() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        before = read_tcp_info(near)
        far, _ = listener.accept()
        for _ in range(20):
            near.sendall(b"?")
            far.sendall(far.recv(1))
            assert near.recv(1) == b"?"
        now = read_tcp_info(near)
        assert now is not None and 20 <= now.received_since(before) <= now.received_segments <= 60
        far.close()

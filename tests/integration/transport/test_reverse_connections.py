"""Reverse connections: a receiver that no sender can reach dials them, and they send over its connections."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.console.authority import Authority
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.net.sockets import make_socket
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.protocol.messages import Hello, decode_ending
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType
from prfaas.transport.receiver.api import Rejection
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import SendFailed
from tests.support.transport_ends import KEY, Far, Near, make_far, make_near, make_ready, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Relay

MIB = 1 << 20


@dataclass
class DialledSender:
    """Sending end that can be dialled, but cannot dial: the address of its link refuses connections."""

    near: Near
    receiver: Receiver
    address: str

    def close(self) -> None:
        self.near.link.close()
        self.receiver.close()


def make_sender(*, certificates: Certificates | None = None, peers: tuple[str, ...] = ("far",)) -> DialledSender:
    near = make_near("127.0.0.1:1", awaits_peer=True)
    receiver = Receiver(
        ReceiverConfig("127.0.0.1:0", certificates=certificates),
        local_name="near",
        key=KEY,
        accept=lambda request, reply: reply(Rejection("protocol", "only sends")),
        on_event=lambda event: None,
        send_over=dict.fromkeys(peers, near.link.serve),
    )
    return DialledSender(near, receiver, receiver.start())


@pytest.fixture
def sender(nothing_is_left: None) -> Iterator[DialledSender]:
    made = make_sender()
    yield made
    made.close()


@pytest.fixture
def far_behind(nothing_is_left: None) -> Iterator[Callable[..., Far]]:
    """Return a factory of receivers that dial an address and that nobody dials."""
    made: list[Far] = []

    def make(address: str, **config: object) -> Far:
        made.append(make_far(fetch_from={"near": address}, **config))
        return made[-1]

    yield make
    for far in made:
        far.receiver.close()


def test_every_byte_arrives_over_reverse_connections(sender: DialledSender, far_behind: Callable[..., Far]) -> None:
    objects = objects_of(MIB, 300_000, 7)
    transfer_id = send(sender.near, objects)
    far = far_behind(sender.address)
    sender.near.assert_completed(transfer_id)
    assert far.contents(transfer_id) == objects
    wait_until(lambda: sender.near.link.snapshot().num_connections == far.receiver.num_connections == 2)
    wait_until(lambda: sender.receiver.num_connections == 0, what="the end of surplus connections")
    assert far.receiver.reverse_dials()[0].error == ""


def test_transfer_continues_after_the_receiver_has_dialled_again(
    sender: DialledSender, far_behind: Callable[..., Far]
) -> None:
    objects = objects_of(*[64 << 10] * 30)
    with Relay(sender.address) as relay:
        far = far_behind(relay.address)
        transfer_id = send(sender.near, objects, ready=False)
        make_ready(sender.near, transfer_id, objects, range(15))
        wait_until(lambda: 15 << 16 in sender.near.acknowledged())
        relay.cut_after(0)
        make_ready(sender.near, transfer_id, objects, range(15, 16))
        wait_until(lambda: sender.near.link.snapshot().num_connections == 0)
        assert sender.near.link.snapshot().is_down
        make_ready(sender.near, transfer_id, objects, range(16, 30))
        relay.restore()
        end = sender.near.assert_completed(transfer_id)
    assert end.stats.wire_bytes < sum(map(len, objects)) + (64 << 10)
    assert far.contents(transfer_id) == objects


def test_unexpected_receiver_is_rejected_and_counted(nothing_is_left: None, far_behind: Callable[..., Far]) -> None:
    closed = make_sender(peers=("somebody else",))
    far = far_behind(closed.address)
    wait_until(lambda: "does not expect far" in far.receiver.reverse_dials()[0].error)
    assert closed.receiver.refused.keys() == {"direction"}
    assert closed.near.link.snapshot().num_connections == 0
    closed.close()


def test_dialled_sender_that_violates_the_protocol_is_told_the_reason(
    nothing_is_left: None, far_behind: Callable[..., Far]
) -> None:
    heard: list[str] = []

    def break_the_protocol(connection: Connection, hello: Hello) -> None:
        connection.write(bytes(HEADER_BYTES))
        header = connection.read_header()
        heard.append(decode_ending(connection.read_payload(header)).message)

    sender = Receiver(
        ReceiverConfig("127.0.0.1:0"),
        local_name="near",
        key=KEY,
        accept=lambda request, reply: reply(Rejection("protocol", "only sends")),
        on_event=lambda event: None,
        send_over={"far": break_the_protocol},
    )
    far = far_behind(sender.start())
    wait_until(lambda: bool(heard))
    wait_until(lambda: sum(far.receiver.refused.values()) > 0)
    assert heard[0].split(":")[0] in far.receiver.refused
    far.receiver.close()
    sender.close()


def test_dialling_receiver_that_violates_the_protocol_is_told_the_reason(sender: DialledSender) -> None:
    made = make_socket(sender.address, congestion_control="bbr", allow_public=False)
    with contextlib.closing(Connection(made)) as far:
        handshake.dial(far, Identity("far", KEY, b"b" * 16), peer_name="near", receives=True)
        far.set_read_timeout(PATIENCE_SECONDS)
        far.write(bytes(HEADER_BYTES))
        header = far.read_header()
        assert header.type is FrameType.ERROR
        assert decode_ending(far.read_payload(header)).message.startswith("magic:")
    wait_until(lambda: sender.receiver.refused == {"magic": 1})


def test_link_that_nobody_dials_is_down_and_names_the_reason(sender: DialledSender) -> None:
    transfer_id = send(sender.near, objects_of(10), deadline=0.3)
    end = sender.near.end(transfer_id)
    assert isinstance(end, SendFailed) and "it dials this agent" in end.message
    assert sender.near.link.snapshot().is_down


def test_both_ends_of_a_reverse_connection_check_certificates(
    nothing_is_left: None, tmp_path: Path, far_behind: Callable[..., Far]
) -> None:
    authority = Authority(tmp_path)

    def certificates(name: str) -> Certificates:
        issued = authority.issue(name)
        return Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key))

    secure = make_sender(certificates=certificates("near"))
    thief = far_behind(secure.address, certificates=certificates("thief"))
    wait_until(lambda: secure.receiver.refused.get("name", 0) > 0)
    assert thief.receiver.num_connections == 0
    thief.receiver.close()
    objects = objects_of(MIB)
    far = far_behind(secure.address, certificates=certificates("far"))
    transfer_id = send(secure.near, objects)
    secure.near.assert_completed(transfer_id)
    assert far.contents(transfer_id) == objects
    secure.close()


@contextlib.contextmanager
def _served(near: Near, near_end: socket.socket) -> Iterator[threading.Thread]:
    """Have the link send over a socket, on a thread that lives as long as the connection."""
    connection = Connection(near_end, state=ConnectionState.SENDING)
    # Without it the connection would be given up during the test.
    connection.set_read_timeout(PATIENCE_SECONDS)
    hello = Hello("far", bytes(32), (1,), (), boot_id=b"b" * 16)
    serving = threading.Thread(target=near.link.serve, args=(connection, hello))
    serving.start()
    try:
        yield serving
    finally:
        connection.abort()
        serving.join(PATIENCE_SECONDS)
        connection.close()


def _assert_cancel_leaves(near: Near) -> None:
    """Check that the first frame of a new connection is a CANCEL."""
    near_end, far_end = socket.socketpair()
    with _served(near, near_end), contextlib.closing(Connection(far_end, state=ConnectionState.RECEIVING)) as peer:
        peer.set_read_timeout(PATIENCE_SECONDS)
        assert peer.read_header().type is FrameType.CANCEL


def _cancelled(near: Near) -> None:
    near.link.cancel(send(near, objects_of(10)), "cancelled", "before there is a connection")


def test_blocked_connection_does_not_keep_a_cancel(near_to: Callable[..., Near]) -> None:
    near = near_to("127.0.0.1:1", awaits_peer=True)
    _cancelled(near)
    near_end, far_end = socket.socketpair()
    near_end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near_end.send(bytes(MIB))
    with far_end, _served(near, near_end) as serving:
        wait_until(lambda: near.link.snapshot().num_connections == 1)
        _assert_cancel_leaves(near)
        assert serving.is_alive(), "the CANCEL did not leave because the other connection ended"

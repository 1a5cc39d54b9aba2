"""A receiving end that no sender can reach: it dials them, and they send over its connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.console.authority import Authority
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.congestion.stall_detector import FRUITLESS_SECONDS, PeerLiveness
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.net.sockets import make_socket
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.transport.protocol.messages import Hello, decode_ending
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType
from prfaas.transport.receiver.api import Rejected
from prfaas.transport.receiver.server import Receiver, ReceiverConfig
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.transport_ends import KEY, Far, Near, make_far, make_near, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Relay

MIB = 1 << 20


@dataclass
class Open:
    """A sending end that anybody reaches, and that reaches nobody: its link's address refuses."""

    near: Near
    receiver: Receiver
    address: str

    def close(self) -> None:
        self.near.link.close()
        self.receiver.close()


def make_open(*, certificates: Certificates | None = None, peers: tuple[str, ...] = ("far",)) -> Open:
    near = make_near("127.0.0.1:1", awaits_peer=True)
    receiver = Receiver(
        ReceiverConfig("127.0.0.1:0", certificates=certificates),
        local_name="near",
        key=KEY,
        accept=lambda request, reply: reply(Rejected("protocol", "nothing comes here")),
        on_event=lambda event: None,
        send_over=dict.fromkeys(peers, near.link.serve),
    )
    return Open(near, receiver, receiver.start())


@pytest.fixture
def opened(nothing_is_left: None) -> Iterator[Open]:
    made = make_open()
    yield made
    made.close()


@pytest.fixture
def far_behind(nothing_is_left: None) -> Iterator[Callable[..., Far]]:
    """A receiving end that dials `address` and is dialled by nobody."""
    made: list[Far] = []

    def make(address: str, **config: object) -> Far:
        made.append(make_far(fetch_from={"near": address}, **config))
        return made[-1]

    yield make
    for far in made:
        far.receiver.close()


def test_every_byte_arrives_over_connections_that_the_receiver_dialled(
    opened: Open, far_behind: Callable[..., Far]
) -> None:
    objects = objects_of(MIB, 300_000, 7)
    transfer_id = send(opened.near, objects)  # before there is any connection
    far = far_behind(opened.address, num_connections=3)
    assert isinstance(opened.near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects
    wait_until(lambda: opened.near.link.snapshot().num_connections == far.receiver.num_connections == 3)
    assert opened.receiver.num_connections == 0
    assert far.receiver.reverse_dials()[0].error == ""


def test_a_receiver_that_dials_says_what_may_be_sent_to_it(opened: Open, far_behind: Callable[..., Far]) -> None:
    budget = RateBudget(8e6)
    far_behind(opened.address, num_connections=2, ingress_of=lambda peer: (budget,))
    wait_until(lambda: opened.near.link.snapshot().num_connections == 2)
    wait_until(lambda: opened.near.link.snapshot().pacing_bytes_per_second == 8_000_000)


def test_the_round_trip_decides_how_many_connections_the_receiver_dials(
    opened: Open, far_behind: Callable[..., Far]
) -> None:
    far = far_behind(opened.address)
    wait_until(lambda: far.receiver.num_connections == 2)
    wait_until(lambda: opened.near.link.snapshot().num_connections == 2)


def _ready(near: Near, transfer_id: bytes, objects: list[bytes], numbers: range) -> None:
    for number in numbers:
        size = len(objects[number])
        near.link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=size)


def test_a_transfer_goes_on_where_it_was_when_the_receiver_has_dialled_again(
    opened: Open, far_behind: Callable[..., Far]
) -> None:
    objects = objects_of(*[64 << 10] * 30)
    with Relay(opened.address) as relay:
        far = far_behind(relay.address, num_connections=4)
        transfer_id = send(opened.near, objects, ready=False)
        _ready(opened.near, transfer_id, objects, range(15))
        wait_until(lambda: 15 << 16 in opened.near.acknowledged())
        relay.cut_after(0)
        _ready(opened.near, transfer_id, objects, range(15, 16))  # which meets the cut
        wait_until(lambda: opened.near.link.snapshot().num_connections == 0)
        assert opened.near.link.snapshot().is_down
        _ready(opened.near, transfer_id, objects, range(16, 30))
        relay.restore()
        end = opened.near.end(transfer_id)
    assert isinstance(end, SendCompleted)
    assert end.stats.wire_bytes < sum(map(len, objects)) + (64 << 10), "what had come did not travel again"
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def test_a_receiver_that_restarts_gets_everything_again(opened: Open, far_behind: Callable[..., Far]) -> None:
    objects = objects_of(MIB, MIB)
    first = far_behind(opened.address, num_connections=2)
    transfer_id = send(opened.near, objects, ready=False)
    _ready(opened.near, transfer_id, objects, range(1))
    wait_until(lambda: MIB in opened.near.acknowledged())
    first.receiver.close()
    second = far_behind(opened.address, num_connections=2)
    _ready(opened.near, transfer_id, objects, range(1, 2))
    assert isinstance(opened.near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in second.memory[transfer_id]] == objects


def test_who_is_not_expected_to_fetch_is_refused_and_counted(
    nothing_is_left: None, far_behind: Callable[..., Far]
) -> None:
    closed = make_open(peers=("somebody else",))
    far = far_behind(closed.address, num_connections=1)
    wait_until(lambda: "does not expect far" in far.receiver.reverse_dials()[0].error)
    assert closed.receiver.refused.keys() == {"direction"}
    assert closed.near.link.snapshot().num_connections == 0
    closed.close()


def test_a_sender_that_was_dialled_and_breaks_the_protocol_hears_why_and_is_counted(
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
        accept=lambda request, reply: reply(Rejected("protocol", "nothing comes here")),
        on_event=lambda event: None,
        send_over={"far": break_the_protocol},
    )
    far = far_behind(sender.start(), num_connections=1)
    wait_until(lambda: bool(heard))
    wait_until(lambda: sum(far.receiver.refused.values()) > 0)
    assert heard[0].split(":")[0] in far.receiver.refused
    far.receiver.close()
    sender.close()


def test_a_receiver_that_dialled_and_breaks_the_protocol_hears_why_and_is_counted(opened: Open) -> None:
    made = make_socket(opened.address, congestion_control="bbr", allow_public=False)
    with contextlib.closing(Connection(made)) as far:
        handshake.dial(far, Identity("far", KEY, b"b" * 16), peer_name="near", receives=True)
        far.set_read_timeout(PATIENCE_SECONDS)
        far.write(bytes(HEADER_BYTES))
        header = far.read_header()
        assert header.type is FrameType.ERROR
        assert decode_ending(far.read_payload(header)).message.startswith("magic:")
    wait_until(lambda: opened.receiver.refused == {"magic": 1})


def test_a_link_that_awaits_its_peer_is_down_and_says_why_when_nobody_dials(opened: Open) -> None:
    transfer_id = send(opened.near, objects_of(10), deadline=0.3)
    end = opened.near.end(transfer_id)
    assert isinstance(end, SendFailed) and "it dials this agent" in end.message
    assert opened.near.link.snapshot().is_down


def test_the_receiver_that_dials_shows_its_certificate_and_wants_to_see_the_senders(
    nothing_is_left: None, tmp_path: Path, far_behind: Callable[..., Far]
) -> None:
    authority = Authority(tmp_path)

    def of(name: str) -> Certificates:
        issued = authority.issue(name)
        return Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key))

    secure = make_open(certificates=of("near"))
    liar = far_behind(secure.address, certificates=of("thief"), num_connections=1)
    wait_until(lambda: secure.receiver.refused.get("name", 0) > 0)
    assert liar.receiver.num_connections == 0
    liar.receiver.close()
    objects = objects_of(MIB)
    far = far_behind(secure.address, certificates=of("far"), num_connections=2)
    transfer_id = send(secure.near, objects)
    assert isinstance(secure.near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects
    secure.close()


@contextlib.contextmanager
def _served(near: Near, ours: socket.socket) -> Iterator[threading.Thread]:
    """The link sends over this socket, on a thread that lives as long as the connection."""
    connection = Connection(ours, state=ConnectionState.SENDING)
    connection.set_read_timeout(PATIENCE_SECONDS)  # as after a handshake; else it is given up while a test watches it
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
    """On a connection that takes it, before anything else."""
    ours, theirs = socket.socketpair()
    with _served(near, ours), contextlib.closing(Connection(theirs, state=ConnectionState.RECEIVING)) as peer:
        peer.set_read_timeout(PATIENCE_SECONDS)
        assert peer.read_header().type is FrameType.CANCEL


def test_what_a_link_offers_first_has_its_whole_time_however_long_ago_the_link_was_made(
    near_to: Callable[..., Near],
) -> None:
    near = near_to("127.0.0.1:1", awaits_peer=True, reconnect_seconds=PATIENCE_SECONDS)
    near.link._peer_liveness = PeerLiveness(
        now=time.monotonic() - 10 * PATIENCE_SECONDS
    )  # as of one that was made then
    offered_at = time.monotonic()
    send(near, objects_of(10), deadline=10 * PATIENCE_SECONDS)
    ours, theirs = socket.socketpair()
    with _served(near, ours), contextlib.closing(Connection(theirs, state=ConnectionState.RECEIVING)) as peer:
        peer.set_read_timeout(PATIENCE_SECONDS)
        assert peer.read_header().type is FrameType.OPEN
        near.link._cancel_late(offered_at + PATIENCE_SECONDS + FRUITLESS_SECONDS / 2)
        assert not near.of(SendFailed)
        near.link._cancel_late(offered_at + 2 * PATIENCE_SECONDS + FRUITLESS_SECONDS)
        [failed] = near.of(SendFailed)
        assert isinstance(failed, SendFailed) and failed.reason == "unreachable"


def _cancelled(near: Near) -> None:
    near.link.cancel(send(near, objects_of(10)), "cancelled", "before there is a connection")


def test_a_cancel_that_its_connection_did_not_take_leaves_on_the_next_one(near_to: Callable[..., Near]) -> None:
    near = near_to("127.0.0.1:1", awaits_peer=True)
    _cancelled(near)
    ours, theirs = socket.socketpair()
    theirs.shutdown(socket.SHUT_RD)  # whoever writes to it fails, whoever reads waits
    with theirs, _served(near, ours) as serving:
        serving.join(PATIENCE_SECONDS)
    _assert_cancel_leaves(near)


def test_a_cancel_that_may_be_lost_with_its_connection_leaves_again(near_to: Callable[..., Near]) -> None:
    near = near_to("127.0.0.1:1", awaits_peer=True)
    _cancelled(near)
    for _ in range(2):
        _assert_cancel_leaves(near)


def test_a_connection_that_takes_nothing_takes_no_cancel_from_the_others(near_to: Callable[..., Near]) -> None:
    near = near_to("127.0.0.1:1", awaits_peer=True)
    _cancelled(near)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(MIB))
    with theirs, _served(near, ours) as serving:
        wait_until(lambda: near.link.snapshot().num_connections == 1)
        _assert_cancel_leaves(near)
        assert serving.is_alive(), "it left because the other one had been given up"

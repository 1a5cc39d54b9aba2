"""Faults of connections, peers and hosts: the bytes arrive intact, or the transfer fails in time with a reason."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.transport.congestion import stall_detector
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Have, encode_have
from prfaas.transport.protocol.wire import HEADER_BYTES, MAGIC, FrameType, Header, chunk_header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveFailed, ReceiveMemoryFree
from prfaas.transport.sender.api import SendAccepted
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import GIVES_UP_SECONDS, Far, Near, make_far, no_thread_starts, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.free_ports import free_address
from tools.link import Filter, LinkShape, Relay

MIB = 1 << 20
ALONE_SECONDS = 2.0  # Reconnect time of receivers whose sender must answer within a quarter of it.


def _may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def test_transfer_waiting_for_prefill_outlives_its_connections(near_to: Callable[..., Near]) -> None:
    far, objects = make_far(silence_seconds=ALONE_SECONDS), objects_of(1000)
    near = near_to(far.address, num_connections=2)
    transfer_id = send(near, objects, ready=False)
    wait_until(lambda: bool(near.of(SendAccepted)) and near.link.snapshot().num_connections == 2)
    for connection in list(far.receiver._dispatcher._transfers._transfers[transfer_id].connections):
        connection.abort()
    cut_at = time.monotonic()
    wait_until(lambda: time.monotonic() - cut_at > 1.5 * ALONE_SECONDS)
    near.link.ready(transfer_id, first_object=0, num_objects=1, offset_bytes=0, length_bytes=1000)
    near.assert_completed(transfer_id)
    assert far.contents(transfer_id) == objects
    far.receiver.close()


def test_restarted_sender_does_not_keep_an_unknown_transfer_alive() -> None:
    far = make_far(silence_seconds=ALONE_SECONDS)
    with RawSender(far.address) as restarted, RawSender(far.address) as first:
        transfer_id = first.open(100)
        first.connection.close()
        header, _ = restarted.heard()
        assert (header.type, header.transfer_id) == (FrameType.REOPEN, transfer_id)
        wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
        [failed] = far.of(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed) and failed.reason == "unreachable"
    far.receiver.close()


def test_arrived_bytes_do_not_travel_again_after_all_connections_died(far: Far, near_to: Callable[..., Near]) -> None:
    objects = objects_of(*[64 << 10] * 30)
    with Relay(far.address, LinkShape(bytes_per_second=1e6)) as relay:
        near = near_to(relay.address)
        relay.cut_after(MIB)
        transfer_id = send(near, objects)
        wait_until(lambda: relay.is_cut)
        relay.restore()
        end = near.assert_completed(transfer_id)
    # A chunk of up to 128 KiB was under way on each of the four connections.
    assert end.stats.wire_bytes < sum(map(len, objects)) + 4 * 128 * 1024 + 100 * HEADER_BYTES
    assert far.contents(transfer_id) == objects


def test_chunk_with_a_damaged_header_travels_again(far: Far, near_to: Callable[..., Near]) -> None:
    # The receiver takes it for a chunk of an unknown transfer, and acknowledges it.
    damaged: list[Header] = []

    def damage() -> Filter:
        return lambda data: data if damaged else _with_another_transfer(data, damaged)

    with Relay(far.address) as relay:
        relay.filter(damage)
        near, objects = near_to(relay.address), objects_of(3_000_000)
        transfer_id = send(near, objects)
        near.assert_completed(transfer_id) and damaged
    assert far.contents(transfer_id) == objects


def _with_another_transfer(data: bytes, damaged: list[Header]) -> bytes:
    """Change the transfer id of the first chunk in `data`."""
    at = data.find(MAGIC)
    while 0 <= at <= len(data) - HEADER_BYTES:
        header = Header.decode(data[at : at + HEADER_BYTES])
        if header.type is FrameType.CHUNK:
            damaged.append(header)
            return data[: at + 12] + bytes([data[at + 12] ^ 1]) + data[at + 13 :]
        at = data.find(MAGIC, at + 1)
    return data


def test_peer_that_receives_only_short_frames_is_unreachable(
    near_to: Callable[..., Near], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "FRUITLESS_SECONDS", 1.0)

    def lose_chunks(connection: Connection) -> None:
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.OPEN:
                connection.write(encode_have(header.transfer_id, Have(Ranges(), ())))
            elif header.type is FrameType.PING:
                connection.write(Header(FrameType.PONG, 0).encode())

    with RawReceiver(lose_chunks) as receiver:
        near = near_to(receiver.address, silence_seconds=GIVES_UP_SECONDS)
        near.assert_failed(send(near, objects_of(10)), "unreachable")


def test_second_copy_of_a_chunk_ends_the_connection_with_the_first(far: Far) -> None:
    payload = objects_of(200_000)[0]
    slab = Slab(0, 1, 0, len(payload))
    with RawSender(far.address) as slow, RawSender(far.address) as fast:
        transfer_id = slow.open(len(payload))
        slow.connection.write(chunk_header(transfer_id, slab, 1) + b"\x01" * 100_000)  # The wrong half of a chunk.
        wait_until(lambda: any(far.memory[transfer_id][0]))
        fast.chunk(transfer_id, slab, payload)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
        assert bytes(far.memory[transfer_id][0]) == payload
        wait_until(lambda: far.receiver.num_connections == 1)
        with contextlib.suppress(OSError):
            slow.connection.write(b"\x01" * 100_000)
    assert bytes(far.memory[transfer_id][0]) == payload


def test_bytes_overwritten_by_an_incomplete_chunk_travel_again(far: Far) -> None:
    payload = objects_of(200_000)[0]
    half = Slab(0, 1, 0, 100_000)
    with RawSender(far.address) as first, RawSender(far.address) as second:
        transfer_id = first.open(len(payload))
        first.chunk(transfer_id, half, payload[:100_000])
        assert first.heard()[0].type is FrameType.ACK
        wrong = bytes(byte ^ 1 for byte in payload[:50_000])
        second.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, 200_000), 1) + wrong)
        wait_until(lambda: far.memory[transfer_id][0][:50_000] == wrong)
        second.connection.close()
        wait_until(lambda: far.receiver.num_connections == 1)
        first.chunk(transfer_id, Slab(0, 1, 100_000, 100_000), payload[100_000:])
        assert first.heard()[0].type is FrameType.ACK
        assert not far.of(ReceiveCompleted)
        first.chunk(transfer_id, half, payload[:100_000])
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert bytes(far.memory[transfer_id][0]) == payload


def test_memory_is_freed_only_after_the_last_chunk_was_written(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(200_000)
        raw.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, 200_000), 1) + b"\x01" * 50_000)
        wait_until(lambda: any(far.memory[transfer_id][0]))
        far.receiver.cancel(transfer_id, "cancelled", "no longer wanted")
        assert ReceiveMemoryFree(transfer_id) not in far.events
        wait_until(lambda: ReceiveMemoryFree(transfer_id) in far.events)
        left_behind = bytes(far.memory[transfer_id][0])
        with contextlib.suppress(OSError):
            raw.connection.write(b"\x02" * 150_000)
        assert not far.of(ReceiveFailed)
    assert bytes(far.memory[transfer_id][0]) == left_behind


@pytest.mark.parametrize(
    ("address", "message"),
    [("10.0.0.5", "not host:port"), ("8.8.8.8:7400", "8.8.8.8 is public"), (f"{'x' * 64}.example:7400", "label")],
    ids=["without a port", "public", "invalid name"],
)
def test_unusable_address_makes_the_peer_unreachable(near_to: Callable[..., Near], address: str, message: str) -> None:
    near = near_to(address, silence_seconds=0.3)
    assert message in near.assert_failed(send(near, objects_of(10)), "unreachable").message
    assert near.link.snapshot().is_down


def test_link_is_down_from_a_failed_dial_to_a_successful_one(near_to: Callable[..., Near]) -> None:
    first = make_far(listen=free_address())
    near = near_to(first.address)
    assert not near.link.snapshot().is_down, "nobody has dialled it"
    near.assert_completed(send(near, objects_of(10)))
    assert not near.link.snapshot().is_down
    first.receiver.close()
    wait_until(lambda: near.link.snapshot().is_down)
    second = make_far(listen=first.address)
    wait_until(lambda: not near.link.snapshot().is_down)
    second.receiver.close()


def test_cancel_leaves_at_once_after_connections_were_closed(far: Far, near_to: Callable[..., Near]) -> None:
    near, num_cancelled = near_to(far.address, num_connections=0), 40
    near.assert_completed(send(near, objects_of(MIB)))
    wait_until(lambda: near.link.snapshot().num_connections == 2, what="the end of the six others")
    # A CANCEL that waited for the next PING would take five seconds, too long for all of them.
    end = time.monotonic() + PATIENCE_SECONDS
    for number in range(1, num_cancelled + 1):
        transfer_id = send(near, objects_of(10), ready=False)
        wait_until(lambda number=number: len(near.of(SendAccepted)) == number + 1)  # type: ignore[misc]
        near.link.cancel(transfer_id, "cancelled", "no longer wanted")
        left = end - time.monotonic()
        wait_until(lambda number=number: len(far.of(ReceiveFailed)) == number, seconds=left)  # type: ignore[misc]


def test_cancel_leaves_when_the_peer_is_reachable_again(far: Far, near_to: Callable[..., Near]) -> None:
    with Relay(far.address) as relay:
        near = near_to(relay.address)
        first = send(near, objects_of(10), deadline=10 * PATIENCE_SECONDS, ready=False)
        wait_until(lambda: bool(near.of(SendAccepted)))
        relay.cut_after(0)
        second = send(near, objects_of(10), deadline=10 * PATIENCE_SECONDS, ready=False)
        wait_until(lambda: relay.is_cut and near.link.snapshot().num_connections == 0)
        near.link._dialler.keeps_warm = False  # As on a long link with loss-based congestion control.
        for transfer_id in (first, second):
            near.link.cancel(transfer_id, "cancelled", "no longer wanted")
        relay.restore()
        wait_until(lambda: len(far.of(ReceiveFailed)) == 2)
        wait_until(lambda: not near.link._outbox.is_busy, what="the answer to both")
    reasons = {event.transfer_id: event.reason for event in far.events if isinstance(event, ReceiveFailed)}
    assert reasons == {first: "cancelled", second: "cancelled"}


def test_link_without_a_thread_fails_transfers_until_one_starts(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    with no_thread_starts():
        near.assert_failed(send(near, objects_of(10)), "no_memory")
    near.assert_completed(send(near, objects_of(10)))


def test_missing_connections_are_made_once_threads_can_start(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address, num_connections=2)
    near.assert_completed(send(near, objects_of(10)))
    with no_thread_starts():
        near.link._dialler.num_wanted = 4  # As after two seconds of a full link.
        wait_until(lambda: "new thread" in near.link._dialler.last_error)
        near.assert_failed(send(near, objects_of(10), deadline=0.5, ready=False), "deadline")
    wait_until(lambda: near.link.snapshot().num_connections == 4)


@pytest.mark.root
@pytest.mark.skipif(not _may_mount(), reason="needs root for host names of its own")
def test_host_name_is_resolved_again_after_a_lost_connection(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 far.example\n")
    first = make_far(listen="127.0.0.2:0")
    port = first.address.rpartition(":")[2]
    near = f"{sys.executable} -m tests.support.end_processes send far.example:{port} 6 60"
    command = ["unshare", "-m", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {near}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as sender:
        wait_until(lambda: bool(first.of(ReceiveCompleted)))
        hosts.write_text("127.0.0.3 far.example\n")
        first.receiver.close()
        second = make_far(listen=f"127.0.0.3:{port}")
        wait_until(lambda: bool(second.of(ReceiveCompleted)))
        sender.kill()
    second.receiver.close()

"""Connections, peers and memory that go at the wrong moment: the bytes are right, or a reason comes in time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Done, Have, encode_done, encode_have
from prfaas.transport.protocol.wire import HEADER_BYTES, MAGIC, FrameType, Header, chunk_header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveFailed, ReceiveMemoryFree
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendFailed
from prfaas.transport.sender.link import PACE_STEP_RATIO
from tests.support.raw_peers import RawReceiver, RawSender
from tests.support.transport_ends import (
    GIVES_UP_SECONDS,
    Far,
    Near,
    make_far,
    no_thread_starts,
    objects_of,
    send,
)
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.free_ports import free_address
from tools.link import Filter, LinkShape, Relay

MIB = 1 << 20
ALONE_SECONDS = 4.0  # `reconnect_seconds` where a peer has a quarter of them, and another, to say that it is there


def _may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def test_connections_that_die_one_by_one_leave_the_rest_to_the_others(far: Far, near_to: Callable[..., Near]) -> None:
    objects = objects_of(2 * MIB, MIB)
    with Relay(far.address, LinkShape(bytes_per_second=2e6)) as relay:
        near = near_to(relay.address)
        transfer_id = send(near, objects)
        for share in (1, 2, 3, 4, 5):
            wait_until(lambda share=share: relay.forwarded_bytes > share * 400_000)  # type: ignore[misc]
            relay.drop_connection()
        assert isinstance(near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def test_a_transfer_that_waits_for_its_prefill_outlives_the_connection_that_it_came_over(
    near_to: Callable[..., Near],
) -> None:
    far, objects = make_far(reconnect_seconds=ALONE_SECONDS), objects_of(1000)
    near = near_to(far.address, num_connections=2)
    transfer_id = send(near, objects, ready=False)
    wait_until(lambda: bool(near.of(SendAccepted)) and near.link.snapshot().num_connections == 2)
    for connection in list(far.receiver._dispatcher._transfers._transfers[transfer_id].connections):
        connection.abort()
    cut_at = time.monotonic()
    wait_until(lambda: time.monotonic() - cut_at > 1.5 * ALONE_SECONDS)
    near.link.ready(transfer_id, first_object=0, num_objects=1, offset_bytes=0, length_bytes=1000)
    assert isinstance(near.end(transfer_id), SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects
    far.receiver.close()


def test_a_sender_that_does_not_know_what_it_is_asked_for_does_not_keep_it_alive() -> None:
    far = make_far(reconnect_seconds=ALONE_SECONDS)
    with RawSender(far.address) as restarted, RawSender(far.address) as first:
        transfer_id = first.open(100)
        first.connection.close()
        header, _ = restarted.heard()
        assert (header.type, header.transfer_id) == (FrameType.REOPEN, transfer_id)
        wait_until(lambda: bool(far.of(ReceiveMemoryFree)))
        [failed] = far.of(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed) and failed.reason == "unreachable"
    far.receiver.close()


def test_a_receiver_that_restarts_gets_everything_again(near_to: Callable[..., Near]) -> None:
    first = make_far(listen=free_address())
    objects = objects_of(MIB, MIB)
    with Relay(first.address, LinkShape(bytes_per_second=2e6)) as relay:
        near = near_to(relay.address)
        relay.hold_after(MIB)
        transfer_id = send(near, objects)
        wait_until(lambda: relay.is_held)
        first.receiver.close()
        second = make_far(listen=first.address)
        relay.release()
        assert isinstance(near.end(transfer_id), SendCompleted)
        assert [bytes(its) for its in second.memory[transfer_id]] == objects
        assert len(near.of(SendAccepted)) == 1
    second.receiver.close()


def test_the_process_that_has_accepted_a_transfer_is_named(near_to: Callable[..., Near]) -> None:
    far = make_far(listen=free_address())
    near = near_to(far.address, num_connections=1)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    far.receiver.close()
    second = make_far(listen=far.address)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    second.receiver.close()
    accepted = [its.process for its in near.of(SendAccepted) if isinstance(its, SendAccepted)]
    assert len(accepted) == len(set(accepted)) == 2


def test_what_arrived_before_all_connections_died_does_not_travel_again(far: Far, near_to: Callable[..., Near]) -> None:
    objects = objects_of(*[64 << 10] * 30)
    with Relay(far.address, LinkShape(bytes_per_second=1e6)) as relay:
        near = near_to(relay.address)
        relay.cut_after(MIB)
        transfer_id = send(near, objects)
        wait_until(lambda: relay.is_cut)
        relay.restore()
        end = near.end(transfer_id)
    assert isinstance(end, SendCompleted)
    # A chunk of up to 128 KiB was under way on each of the four connections.
    assert end.stats.wire_bytes < sum(map(len, objects)) + 4 * 128 * 1024 + 100 * HEADER_BYTES
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def test_a_peer_that_never_answers_open_ends_at_the_deadline(near_to: Callable[..., Near]) -> None:
    def read_forever(connection: Connection) -> None:
        while True:
            connection.read_payload(connection.read_header())

    with RawReceiver(read_forever) as receiver:
        near = near_to(receiver.address)
        end = near.end(send(near, objects_of(10), deadline=0.5))
        assert isinstance(end, SendFailed) and end.reason == "deadline"


def test_an_end_that_was_lost_with_its_connection_is_asked_for_again(near_to: Callable[..., Near]) -> None:
    """Every byte is acknowledged on one connection; DONE is said on another, which is dead for the sender alone."""
    num_opened = 0

    def serve(connection: Connection) -> None:
        nonlocal num_opened
        num_chunks = 0
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.CHUNK:
                num_chunks += 1
                connection.write(Header(FrameType.ACK, 0, offset=num_chunks).encode())
            elif header.type is FrameType.PING:
                connection.write(Header(FrameType.PONG, 0).encode())
            elif header.type is FrameType.OPEN:
                num_opened += 1
                answer = encode_have(header.transfer_id, Have(Ranges(), ()))
                connection.write(answer if num_opened == 1 else encode_done(header.transfer_id, Done(10, 0)))

    with RawReceiver(serve) as receiver:
        near = near_to(receiver.address, num_connections=2)
        assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)


def test_a_chunk_whose_header_was_damaged_comes_again(far: Far, near_to: Callable[..., Near]) -> None:
    """It reads as one of an unknown transfer, and is acknowledged."""
    damaged: list[Header] = []

    def damage() -> Filter:
        return lambda data: data if damaged else _with_another_transfer(data, damaged)

    with Relay(far.address) as relay:
        relay.filter(damage)
        near, objects = near_to(relay.address), objects_of(3_000_000)
        transfer_id = send(near, objects)
        assert isinstance(near.end(transfer_id), SendCompleted) and damaged
    assert [bytes(its) for its in far.memory[transfer_id]] == objects


def _with_another_transfer(data: bytes, damaged: list[Header]) -> bytes:
    """The first chunk in `data` has another transfer id."""
    at = data.find(MAGIC)
    while 0 <= at <= len(data) - HEADER_BYTES:
        header = Header.decode(data[at : at + HEADER_BYTES])
        if header.type is FrameType.CHUNK:
            damaged.append(header)
            return data[: at + 12] + bytes([data[at + 12] ^ 1]) + data[at + 13 :]
        at = data.find(MAGIC, at + 1)
    return data


def test_every_connection_of_a_transfer_hears_its_end(far: Far) -> None:
    with RawSender(far.address) as one, RawSender(far.address) as other:
        transfer_id = one.open(100)
        other.chunk(transfer_id, Slab(0, 1, 0, 50), bytes(50))
        assert other.heard()[0].type is FrameType.ACK
        one.chunk(transfer_id, Slab(0, 1, 50, 50), bytes(50))
        assert {one.heard()[0].type, one.heard()[0].type} == {FrameType.ACK, FrameType.DONE}
        assert other.heard()[0].type is FrameType.DONE


def test_a_peer_that_never_ends_the_handshake_is_unreachable(near_to: Callable[..., Near]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        near = near_to(f"{host}:{port}", num_connections=1, reconnect_seconds=GIVES_UP_SECONDS)
        end = near.end(send(near, objects_of(10)))
        assert isinstance(end, SendFailed) and end.reason == "unreachable"


def test_a_peer_that_closes_every_connection_after_the_handshake_is_unreachable(near_to: Callable[..., Near]) -> None:
    with RawReceiver(lambda connection: None) as receiver:
        near = near_to(receiver.address, reconnect_seconds=3.0)  # far longer than until it is dialled again
        end = near.end(send(near, objects_of(10)))
        assert isinstance(end, SendFailed) and end.reason == "unreachable", "which comes before the deadline"


def test_a_peer_that_only_short_frames_reach_is_unreachable(near_to: Callable[..., Near]) -> None:
    def lose_chunks(connection: Connection) -> None:
        while True:
            header = connection.read_header()
            connection.read_payload(header)
            if header.type is FrameType.OPEN:
                connection.write(encode_have(header.transfer_id, Have(Ranges(), ())))
            elif header.type is FrameType.PING:
                connection.write(Header(FrameType.PONG, 0).encode())

    with RawReceiver(lose_chunks) as receiver:
        near = near_to(receiver.address, reconnect_seconds=GIVES_UP_SECONDS)
        end = near.end(send(near, objects_of(10)))
        assert isinstance(end, SendFailed) and end.reason == "unreachable", "which comes before the deadline"


def test_a_second_copy_ends_the_connection_on_which_the_first_is_stuck(far: Far) -> None:
    payload = objects_of(200_000)[0]
    slab = Slab(0, 1, 0, len(payload))
    with RawSender(far.address) as slow, RawSender(far.address) as fast:
        transfer_id = slow.open(len(payload))
        slow.connection.write(chunk_header(transfer_id, slab, 1) + b"\x01" * 100_000)  # half of it, and wrong
        wait_until(lambda: any(far.memory[transfer_id][0]))
        fast.chunk(transfer_id, slab, payload)
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
        assert bytes(far.memory[transfer_id][0]) == payload
        wait_until(lambda: far.receiver.num_connections == 1)
        with contextlib.suppress(OSError):
            slow.connection.write(b"\x01" * 100_000)
    assert bytes(far.memory[transfer_id][0]) == payload


def test_what_a_chunk_has_written_over_before_it_was_cut_off_comes_again(far: Far) -> None:
    payload = objects_of(200_000)[0]
    half = Slab(0, 1, 0, 100_000)
    with RawSender(far.address) as first, RawSender(far.address) as second:
        transfer_id = first.open(len(payload))
        first.chunk(transfer_id, half, payload[:100_000])
        assert first.heard()[0].type is FrameType.ACK
        wrong = bytes(its ^ 1 for its in payload[:50_000])
        second.connection.write(chunk_header(transfer_id, Slab(0, 1, 0, 200_000), 1) + wrong)
        wait_until(lambda: far.memory[transfer_id][0][:50_000] == wrong)
        second.connection.close()
        wait_until(lambda: far.receiver.num_connections == 1)
        first.chunk(transfer_id, Slab(0, 1, 100_000, 100_000), payload[100_000:])
        assert first.heard()[0].type is FrameType.ACK
        assert not far.of(ReceiveCompleted), "50 000 bytes are not what they were"
        first.chunk(transfer_id, half, payload[:100_000])
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert bytes(far.memory[transfer_id][0]) == payload


def test_memory_is_not_free_while_a_chunk_lands_and_nothing_lands_after(far: Far) -> None:
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


def test_slices_of_hundreds_of_blocks_travel_in_few_frames(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    objects = objects_of(*[16 << 10] * 300)
    transfer_id = send(near, objects, ready=False)
    for layer in range(8):
        near.link.ready(transfer_id, first_object=0, num_objects=300, offset_bytes=layer << 11, length_bytes=2 << 10)
    end = near.end(transfer_id)
    assert isinstance(end, SendCompleted)
    assert [bytes(its) for its in far.memory[transfer_id]] == objects
    num_chunks = (end.stats.wire_bytes - sum(map(len, objects))) / HEADER_BYTES
    assert num_chunks <= 8 * 10, "one frame a block and layer would be 2400"


def test_an_urgent_transfer_is_not_stuck_behind_a_large_one(far: Far, near_to: Callable[..., Near]) -> None:
    with Relay(far.address) as relay:
        near, size = near_to(relay.address, num_connections=2), 256 << 10
        urgent = send(near, objects_of(size), priority=0, ready=False)
        wait_until(lambda: bool(near.of(SendAccepted)))
        relay.hold_after(2 * MIB)
        large = send(near, [bytes(256 * MIB)], priority=1)
        wait_until(lambda: relay.is_held)
        near.link.ready(urgent, first_object=0, num_objects=1, offset_bytes=0, length_bytes=size)
        # What is under way comes first, then the urgent one; not all of the large one can.
        relay.hold_after(near.link.snapshot().unacknowledged_bytes + 32 * MIB)
        relay.release()
        wait_until(lambda: urgent in [its.transfer_id for its in far.of(ReceiveCompleted)], what="the urgent one")
        near.link.cancel(large, "cancelled", "seen enough")
        relay.release()
        assert isinstance(near.end(urgent), SendCompleted)
        assert isinstance(near.end(large), SendFailed)


def test_a_public_peer_is_not_dialled_without_a_word_for_it(near_to: Callable[..., Near]) -> None:
    near = near_to("8.8.8.8:7400", reconnect_seconds=0.3)
    end = near.end(send(near, objects_of(10)))
    assert isinstance(end, SendFailed) and end.reason == "unreachable" and "8.8.8.8 is public" in end.message


def test_an_address_that_is_no_name_makes_the_peer_unreachable_and_says_so(near_to: Callable[..., Near]) -> None:
    near = near_to(f"{'x' * 64}.example:7400", reconnect_seconds=0.3)
    end = near.end(send(near, objects_of(10)))
    assert isinstance(end, SendFailed) and end.reason == "unreachable" and "label" in end.message
    assert near.link.snapshot().is_down


def test_a_transfer_that_opens_while_the_peer_was_long_gone_has_its_whole_reconnect_time(
    near_to: Callable[..., Near],
) -> None:
    first = make_far(listen=free_address())
    near = near_to(first.address, reconnect_seconds=1.0)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    first.receiver.close()
    wait_until(lambda: near.link.snapshot().num_connections == 0)
    gone_at = time.monotonic()
    wait_until(lambda: time.monotonic() - gone_at > 1.2)  # longer than reconnect_seconds
    transfer_id = send(near, objects_of(10, seed=2))
    second = make_far(listen=first.address)
    assert isinstance(near.end(transfer_id), SendCompleted)
    second.receiver.close()


def test_a_link_is_down_from_the_first_dial_that_fails_until_one_succeeds(near_to: Callable[..., Near]) -> None:
    first = make_far(listen=free_address())
    near = near_to(first.address)
    assert not near.link.snapshot().is_down, "nobody has dialled it"
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    assert not near.link.snapshot().is_down
    first.receiver.close()
    wait_until(lambda: near.link.snapshot().is_down)
    second = make_far(listen=first.address)
    wait_until(lambda: not near.link.snapshot().is_down)
    second.receiver.close()


def test_a_short_link_keeps_two_of_the_connections_it_dialled(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address, num_connections=0)
    assert isinstance(near.end(send(near, objects_of(MIB))), SendCompleted)
    wait_until(lambda: (near.link.snapshot().num_connections, far.receiver.num_connections) == (2, 2))
    wait_until(lambda: _num_dialling() == 2, what="the end of the threads of the six others")
    assert isinstance(near.end(send(near, objects_of(MIB, seed=2))), SendCompleted)
    near.link._dialler.num_wanted = 4  # as after two seconds of a full link
    wait_until(lambda: near.link.snapshot().num_connections == 4)


def _num_dialling() -> int:
    return sum(its.name == "send-far" for its in threading.enumerate())


def test_a_cancel_leaves_at_once_although_more_connections_were_dialled_than_are_wanted(
    far: Far, near_to: Callable[..., Near]
) -> None:
    near, num_cancelled = near_to(far.address, num_connections=0), 40
    assert isinstance(near.end(send(near, objects_of(MIB))), SendCompleted)
    wait_until(lambda: near.link.snapshot().num_connections == 2, what="the end of the six others")
    end = time.monotonic() + PATIENCE_SECONDS  # of all: one that waits for the next PING takes five seconds
    for number in range(1, num_cancelled + 1):
        transfer_id = send(near, objects_of(10), ready=False)
        wait_until(lambda number=number: len(near.of(SendAccepted)) == number + 1)  # type: ignore[misc]
        near.link.cancel(transfer_id, "cancelled", "no longer wanted")
        left = end - time.monotonic()
        wait_until(lambda number=number: len(far.of(ReceiveFailed)) == number, seconds=left)  # type: ignore[misc]


def test_a_cancel_leaves_over_connections_that_nobody_wants_any_more(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address)
    transfer_id = send(near, objects_of(10), ready=False)
    wait_until(lambda: bool(near.of(SendAccepted)) and near.link.snapshot().num_connections == 4)
    near.link._dialler.keeps_warm = False  # as where a long link's congestion control is loss-based
    near.link.cancel(transfer_id, "cancelled", "no longer wanted")
    wait_until(lambda: bool(far.of(ReceiveFailed)))
    [failed] = far.of(ReceiveFailed)
    assert isinstance(failed, ReceiveFailed) and failed.reason == "cancelled"
    wait_until(lambda: near.link.snapshot().num_connections == 0)


def test_a_cancel_is_said_once_the_peer_is_back_although_nothing_is_sent_any_more(
    far: Far, near_to: Callable[..., Near]
) -> None:
    with Relay(far.address) as relay:
        near = near_to(relay.address)
        first = send(near, objects_of(10), deadline=10 * PATIENCE_SECONDS, ready=False)
        wait_until(lambda: bool(near.of(SendAccepted)))
        relay.cut_after(0)
        second = send(near, objects_of(10), deadline=10 * PATIENCE_SECONDS, ready=False)
        wait_until(lambda: relay.is_cut and near.link.snapshot().num_connections == 0)
        near.link._dialler.keeps_warm = False  # as where a long link's congestion control is loss-based
        for transfer_id in (first, second):
            near.link.cancel(transfer_id, "cancelled", "no longer wanted")
        relay.restore()
        wait_until(lambda: len(far.of(ReceiveFailed)) == 2)
        wait_until(lambda: not near.link._outbox.is_busy, what="the answer to both")
    reasons = {event.transfer_id: event.reason for event in far.events if isinstance(event, ReceiveFailed)}
    assert reasons == {first: "cancelled", second: "cancelled"}


def test_a_bug_that_a_watcher_meets_at_every_look_is_logged_once_a_second(
    far: Far, near_to: Callable[..., Near], caplog: pytest.LogCaptureFixture
) -> None:
    def logged_at(event: str) -> list[float]:
        return [record.created for record in caplog.records if record.getMessage().startswith(event)]

    near = near_to(far.address)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    near.link._workers._stalls = None  # type: ignore[assignment]
    far.receiver._reverse_dialers.append(None)  # type: ignore[arg-type]
    events = ("link.watch_failed", "receiver.tick_failed")
    try:
        wait_until(lambda: all(len(logged_at(event)) > 1 for event in events))
    finally:
        far.receiver._reverse_dialers.pop()
    for event in events:
        first, second, *_ = logged_at(event)
        assert second - first > 0.9


def test_a_link_for_which_no_thread_can_be_started_says_so_and_is_tried_again(
    far: Far, near_to: Callable[..., Near]
) -> None:
    near = near_to(far.address)
    with no_thread_starts():
        end = near.end(send(near, objects_of(10)))
    assert isinstance(end, SendFailed) and end.reason == "no_memory"
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)


def test_connections_for_which_no_thread_can_be_started_are_made_once_it_can(
    far: Far, near_to: Callable[..., Near]
) -> None:
    near = near_to(far.address, num_connections=2)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    with no_thread_starts():
        near.link._dialler.num_wanted = 4  # as after two seconds of a full link
        wait_until(lambda: "new thread" in near.link._dialler.last_error)
        end = near.end(send(near, objects_of(10), deadline=0.5, ready=False))
        assert isinstance(end, SendFailed) and end.reason == "deadline"
    wait_until(lambda: near.link.snapshot().num_connections == 4)


def test_the_kernel_is_told_each_connections_share_of_the_budget(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address, num_connections=4, max_bytes_per_second=8e6)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    wait_until(lambda: near.link.snapshot().num_connections == 4)
    wait_until(lambda: near.link.snapshot().pacing_bytes_per_second == 8_000_000)


def test_a_link_at_which_a_large_chunk_takes_longer_than_a_peer_may_be_silent_gets_on(
    far: Far, near_to: Callable[..., Near]
) -> None:
    near = near_to(far.address, num_connections=1, max_bytes_per_second=20_000, packs=False)
    transfer_id = send(near, [bytes(MIB)] * 64, deadline=2 * PATIENCE_SECONDS)
    wait_until(lambda: any(near.acknowledged()), what="the first chunk, in a connection that lasts")
    near.link.cancel(transfer_id, "cancelled", "seen enough")
    assert isinstance(near.end(transfer_id), SendFailed)


def _pace(near: Near) -> int:
    return near.link.snapshot().pacing_bytes_per_second


def _has_pace(near: Near, bytes_per_second: float) -> bool:
    """As closely as the kernel is told of changes."""
    return math.isclose(_pace(near), bytes_per_second, rel_tol=1.1 * PACE_STEP_RATIO)


def _sharing(far: Far, near_to: Callable[..., Near], budget: RateBudget, name: str) -> Near:
    """A link of a budget that has its connections."""
    near = near_to(far.address, num_connections=2, name=name, budgets=(budget,), packs=False)
    assert isinstance(near.end(send(near, objects_of(10))), SendCompleted)
    wait_until(lambda: near.link.snapshot().num_connections == 2)
    return near


def _fill(near: Near) -> bytes:
    """Have more to send than a test takes."""
    return send(near, [bytes(MIB)] * 1024, deadline=10 * PATIENCE_SECONDS)


def test_links_that_share_a_budget_divide_it_while_both_send(far: Far, near_to: Callable[..., Near]) -> None:
    budget = RateBudget(8e6)
    first, second = (_sharing(far, near_to, budget, name) for name in ("a", "b"))
    far.discards = True
    _fill(first)
    wait_until(lambda: _has_pace(first, 8e6))
    bulk = _fill(second)
    wait_until(lambda: _has_pace(first, 4e6) and _has_pace(second, 4e6))
    second.link.cancel(bulk, "cancelled", "seen enough")
    wait_until(lambda: _has_pace(first, 8e6))


def test_what_a_link_that_waits_for_its_prefill_does_not_use_goes_to_the_others(
    far: Far, near_to: Callable[..., Near]
) -> None:
    budget, turns = RateBudget(16e6), itertools.count()
    layers, bulk = (_sharing(far, near_to, budget, name) for name in ("a", "b"))
    far.discards = True
    _fill(bulk)
    transfer_id = send(layers, [bytes(4096)] * 2000, deadline=10 * PATIENCE_SECONDS, ready=False)

    def bulk_has_most() -> bool:
        """At every fifth look, 50 ms apart, another layer is finished."""
        number, is_between = divmod(next(turns), 5)
        if not is_between:
            layers.link.ready(transfer_id, first_object=number, num_objects=1, offset_bytes=0, length_bytes=4096)
        return layers.link.snapshot().acknowledged_bytes > 16 * 4096 and _pace(bulk) > 0.8 * 16e6

    wait_until(bulk_has_most)


def test_a_limit_that_is_learned_is_told_to_the_kernel_and_taken_back(far: Far, near_to: Callable[..., Near]) -> None:
    budget = RateBudget(0.0)
    near = _sharing(far, near_to, budget, "a")
    held = send(near, objects_of(10), ready=False)
    delivered, resent, at = 0, 0, time.monotonic() + 60  # what this link itself says is older, and left out

    def neighbour(*, lost: int) -> None:
        """Another link of the budget sends for a minute."""
        nonlocal delivered, resent, at
        for _ in range(1200):
            delivered, resent, at = delivered + 400_000, resent + lost // 20, at + 1 / 20
            budget.share("neighbour", LinkUsage(True, True, delivered, resent), now=at)

    neighbour(lost=2_000_000)
    wait_until(lambda: 3_900_000 < _pace(near) < 4_100_000)
    neighbour(lost=0)
    wait_until(lambda: _pace(near) > 1 << 60)
    near.link.cancel(held, "cancelled", "seen enough")


@pytest.mark.root
@pytest.mark.skipif(not _may_mount(), reason="needs root, to give a process host names of its own")
def test_a_name_that_moves_to_another_address_is_looked_up_again_when_the_connection_is_lost(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 far.example\n")
    first = make_far(listen="127.0.0.2:0")
    port = first.address.rpartition(":")[2]
    near = f"{sys.executable} -m tests.support.sender_process far.example:{port} 6"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {near}"]) as sender:
        wait_until(lambda: bool(first.of(ReceiveCompleted)))
        hosts.write_text("127.0.0.3 far.example\n")
        first.receiver.close()
        second = make_far(listen=f"127.0.0.3:{port}")
        wait_until(lambda: bool(second.of(ReceiveCompleted)))
        sender.kill()
    second.receiver.close()

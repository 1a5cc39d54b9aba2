"""Probes over real sockets: what comes is thrown away, and what the link carries is known afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from prfaas.transport.congestion.rate_estimator import LinkHealth
from prfaas.transport.receiver.api import ReceiveCompleted
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.transport_ends import Far, Near, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS, wait_until
from tools.demo.corruption import flip_byte_in_first_chunk
from tools.link import LinkShape, Relay

RATE = 10e6
PIECE = os.urandom(1 << 20)


def test_what_nobody_wants_is_checked_acknowledged_and_kept_nowhere(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    near, objects = near_to(far.address), objects_of(1, 70_000, 3_000_000)
    end = near.end(send(near, objects))
    assert isinstance(end, SendCompleted) and end.stats.checksum_failures == 0
    wait_until(lambda: len(far.of(ReceiveCompleted)) == 1)
    assert near.link.snapshot().acknowledged_bytes == sum(map(len, objects))
    assert far.memory == {}


def test_what_nobody_wants_and_comes_changed_again_and_again_fails(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    with Relay(far.address) as relay:
        relay.filter(flip_byte_in_first_chunk)
        near = near_to(relay.address)
        end = near.end(send(near, objects_of(3_000_000)))
    assert isinstance(end, SendFailed) and end.reason == "checksum"


def _probe(near: Near, *, num_pieces: int = 64) -> LinkHealth:
    """What one probe finds, which may be no rate on a machine that was busy with something else."""
    near.link.begin_probe()
    transfer_id = send(near, [PIECE] * num_pieces)
    while not near.link.has_found and near.link.snapshot().num_transfers:
        assert near.link.snapshot().achievable_bytes_per_second == 0, "before it has ended"
        time.sleep(POLL_SECONDS)
    found = near.link.end_probe()
    near.link.cancel(transfer_id, "cancelled", "the probe is over")
    near.end(transfer_id)
    return found


def test_a_probe_finds_what_a_slow_link_carries(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    deadline, found = time.monotonic() + PATIENCE_SECONDS, 0.0
    with Relay(far.address, LinkShape(bytes_per_second=RATE)) as relay:
        near = near_to(relay.address, num_connections=1)
        while not found:
            assert time.monotonic() < deadline
            found = _probe(near).achievable_bytes_per_second
        assert found < 2 * RATE, "which a busy machine only makes less"
        state = near.link.snapshot()
        assert (state.rate_source, state.is_probing) == ("probe", False)
        while near.link.snapshot().rate_source != "transfers":  # once one has waited, or confirmed it
            assert time.monotonic() < deadline + PATIENCE_SECONDS
            near.end(send(near, [PIECE] * 8))


def test_a_probe_of_too_few_bytes_shows_what_the_link_carries_at_least(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    deadline = time.monotonic() + PATIENCE_SECONDS
    with Relay(far.address, LinkShape(bytes_per_second=RATE)) as relay:
        near = near_to(relay.address, num_connections=1)
        found = _probe(near, num_pieces=3)
        while found.achievable_bytes_per_second or not found.least_bytes_per_second:  # on a machine that was busy
            assert time.monotonic() < deadline
            found = _probe(near, num_pieces=3)
        assert 0 < found.least_bytes_per_second < 1.5 * RATE
        assert near.link.snapshot().rate_source is None

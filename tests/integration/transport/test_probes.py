"""Probes of a link over real sockets: the receiver discards the bytes, and the link learns its rate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from prfaas.transport.congestion.rate_estimator import LinkHealth
from prfaas.transport.receiver.api import ReceiveCompleted
from tests.support.transport_ends import Far, Near, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS, wait_until
from tools.link import LinkShape, Relay

RATE = 10e6
PIECE = os.urandom(1 << 20)


def test_discarded_transfer_is_checked_and_acknowledged(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    near, objects = near_to(far.address), objects_of(1, 70_000, 3_000_000)
    end = near.assert_completed(send(near, objects))
    assert end.stats.checksum_failures == 0
    wait_until(lambda: len(far.of(ReceiveCompleted)) == 1)
    assert near.link.snapshot().acknowledged_bytes == sum(map(len, objects))
    assert far.memory == {}


def _probe(near: Near) -> LinkHealth:
    """Return the findings of one probe. A busy machine may find no rate."""
    near.link.begin_probe()
    transfer_id = send(near, [PIECE] * 64)
    while not near.link.has_found and near.link.snapshot().num_transfers:
        assert near.link.snapshot().achievable_bytes_per_second == 0
        time.sleep(POLL_SECONDS)
    found = near.link.end_probe()
    near.link.cancel(transfer_id, "cancelled", "the probe is over")
    near.end(transfer_id)
    return found


def test_probe_finds_the_rate_of_a_slow_link(far: Far, near_to: Callable[..., Near]) -> None:
    far.discards = True
    deadline, found = time.monotonic() + PATIENCE_SECONDS, 0.0
    with Relay(far.address, LinkShape(bytes_per_second=RATE)) as relay:
        near = near_to(relay.address, num_connections=1)
        while not found:
            assert time.monotonic() < deadline
            found = _probe(near).achievable_bytes_per_second
        assert found < 2 * RATE
        state = near.link.snapshot()
        assert (state.rate_source, state.is_probing) == ("probe", False)
        # A transfer whose bytes wait confirms the rate.
        while near.link.snapshot().rate_source != "transfers":
            assert time.monotonic() < deadline + PATIENCE_SECONDS
            near.end(send(near, [PIECE] * 8))

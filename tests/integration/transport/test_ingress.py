"""A receiver that bounds what comes: its senders keep to it, whoever dials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.receiver.limits import CHANGE_RATIO
from prfaas.transport.sender.api import SendFailed
from prfaas.transport.sender.link import PACE_STEP_RATIO
from tests.support.transport_ends import Far, Near, make_far, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.free_ports import free_address

MIB = 1 << 20
LIMIT = 16e6
ROOM = 2.0  # for what a busy machine had on its way when a count began; without a limit it is a hundred times as much


@pytest.fixture
def limited(nothing_is_left: None) -> Iterator[Far]:
    """A receiver to which all peers together may send so much; what comes is thrown away."""
    budget = RateBudget(LIMIT)
    made = make_far(ingress_of=lambda peer: (budget,))
    made.discards = True
    yield made
    made.receiver.close()


def _fill(near: Near) -> bytes:
    """Have more to send than a test takes."""
    return send(near, [bytes(MIB)] * 1024, deadline=10 * PATIENCE_SECONDS)


def _has_pace(near: Near, bytes_per_second: float) -> bool:
    """As closely as peers, and kernels, are told of changes."""
    pace = near.link.snapshot().pacing_bytes_per_second
    return math.isclose(pace, bytes_per_second, rel_tol=CHANGE_RATIO + 2 * PACE_STEP_RATIO)


def _acknowledged(*nears: Near) -> int:
    return sum(near.link.snapshot().acknowledged_bytes for near in nears)


def test_what_all_peers_send_together_keeps_to_the_limit(limited: Far, near_to: Callable[..., Near]) -> None:
    nears = [near_to(limited.address, num_connections=2, name=name, packs=False) for name in ("a", "b")]
    bulks = [_fill(near) for near in nears]
    wait_until(lambda: all(_has_pace(near, LIMIT / 2) for near in nears), what="equal shares")
    began, before = time.monotonic(), _acknowledged(*nears)
    wait_until(lambda: _acknowledged(*nears) - before >= 4 * LIMIT, what="four seconds' worth of bytes")
    assert (_acknowledged(*nears) - before) / (time.monotonic() - began) < ROOM * LIMIT
    nears[1].link.cancel(bulks[1], "cancelled", "seen enough")
    assert isinstance(nears[1].end(bulks[1]), SendFailed)
    wait_until(lambda: _has_pace(nears[0], LIMIT), what="all of it for the other")


def test_a_sender_that_finds_another_receiver_at_its_peer_is_bound_no_more(near_to: Callable[..., Near]) -> None:
    budget = RateBudget(LIMIT)
    first = make_far(listen=free_address(), ingress_of=lambda peer: (budget,))
    near = near_to(first.address, num_connections=2)
    send(near, [bytes(10)])
    wait_until(lambda: _has_pace(near, LIMIT), what="the limit")
    first.receiver.close()
    second = make_far(listen=first.address)
    send(near, [bytes(10)])
    wait_until(lambda: near.link.snapshot().pacing_bytes_per_second > 1 << 60, what="the end of the limit")
    second.receiver.close()

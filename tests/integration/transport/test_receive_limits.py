"""Receive limits: senders keep to the limit of their receiver."""

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
ROOM = 2.0  # For bytes that were under way when the count began. Without a limit the ratio is above 100.


@pytest.fixture
def limited(nothing_is_left: None) -> Iterator[Far]:
    """Make a receiver that limits all its peers together."""
    budget = RateBudget(LIMIT)
    made = make_far(ingress_of=lambda peer: (budget,))
    yield made
    made.receiver.close()


def _fill(near: Near) -> bytes:
    """Send more bytes than a test can take."""
    return send(near, [bytes(MIB)] * 1024, deadline=10 * PATIENCE_SECONDS)


def _has_pace(near: Near, bytes_per_second: float) -> bool:
    """Compare the pace as precisely as peers and kernels are told of changes."""
    pace = near.link.snapshot().pacing_bytes_per_second
    return math.isclose(pace, bytes_per_second, rel_tol=CHANGE_RATIO + 2 * PACE_STEP_RATIO)


def _acknowledged(*nears: Near) -> int:
    return sum(near.link.snapshot().acknowledged_bytes for near in nears)


def test_peers_together_keep_to_the_receive_limit(limited: Far, near_to: Callable[..., Near]) -> None:
    nears = [near_to(limited.address, num_connections=2, name=name, packs=False) for name in ("a", "b")]
    bulks = [_fill(near) for near in nears]
    wait_until(lambda: all(_has_pace(near, LIMIT / 2) for near in nears), what="equal shares")
    began, before = time.monotonic(), _acknowledged(*nears)
    wait_until(lambda: _acknowledged(*nears) - before >= 2 * LIMIT, what="two seconds' worth of bytes")
    assert (_acknowledged(*nears) - before) / (time.monotonic() - began) < ROOM * LIMIT
    nears[1].link.cancel(bulks[1], "cancelled", "seen enough")
    assert isinstance(nears[1].end(bulks[1]), SendFailed)
    wait_until(lambda: _has_pace(nears[0], LIMIT), what="the whole limit for the other peer")


def test_two_links_of_one_sender_divide_the_limit_of_their_peer(limited: Far, near_to: Callable[..., Near]) -> None:
    budget = RateBudget(math.inf)
    nears = [near_to(limited.address, num_connections=2, packs=False, peer_budget=budget) for _ in range(2)]
    for near in nears:
        _fill(near)
    wait_until(lambda: all(_has_pace(near, LIMIT / 2) for near in nears), what="equal shares")


def test_limit_of_a_receiver_does_not_bind_its_successor(near_to: Callable[..., Near]) -> None:
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

"""Links: their reuse, rate budgets and priorities."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.agent.config import AgentConfig, PeerRateConfig
from prfaas.agent.links import ORDINARY, Links, RateLimits, wire_priority
from prfaas.transport.net.dialler import KEEP_WARM_SECONDS
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.chunker import MAX_PRIORITY
from prfaas.types import AgentName

EAST, WEST = AgentName("east"), AgentName("west")


@pytest.fixture
def links() -> Iterator[Links]:
    config = AgentConfig(name="n", secret_file=Path("s"), dialled_by=("west",), silence_seconds=3600.0)
    made = Links(config, key=b"k" * 32, certificates=None, on_event=lambda event: None)
    yield made
    made.close()


def test_idle_link_is_removed_and_recreated_on_use(links: Links) -> None:
    link = links.to("127.0.0.1:1", EAST)
    assert links.take_idle(time.monotonic() + KEEP_WARM_SECONDS - 60) == []
    assert links.to("127.0.0.1:1", EAST) is link
    assert links.take_idle(time.monotonic() + KEEP_WARM_SECONDS) == [link]
    assert links.to("127.0.0.1:1", EAST) is not link
    link.close()


def test_busy_and_reverse_links_are_kept(links: Links) -> None:
    links.to("anywhere", WEST)
    link = links.to("127.0.0.1:1", EAST)
    link.open(SendRequest(bytes(16), b"", [10], lambda index: memoryview(bytes(10)), 0, deadline_seconds=3600.0))
    assert links.take_idle(time.monotonic() + 2 * KEEP_WARM_SECONDS) == []


def test_peer_gets_the_budget_of_every_matching_entry() -> None:
    limits = RateLimits(
        [
            PeerRateConfig(peers="tokyo-*", max_rate=5e8),
            PeerRateConfig(peers="*", max_rate=1e8, each=True),
            PeerRateConfig(peers="osaka-1", max_rate=2e8),
        ]
    )
    first, second = limits.budgets_of("tokyo-1"), limits.budgets_of("tokyo-2")
    assert [budget.bytes_per_second for budget in first] == [budget.bytes_per_second for budget in second] == [5e8, 1e8]
    assert first[0] is second[0], "what all may send together"
    assert first[1] is not second[1], "what each may send"
    assert [budget.bytes_per_second for budget in limits.budgets_of("osaka-1")] == [1e8, 2e8]


@pytest.mark.parametrize(
    ("priority", "on_the_wire"),
    [(0, ORDINARY), (-1, 2), (-3, 0), (-(2**63), 0), (1, 4), (4, MAX_PRIORITY), (2**63 - 1, MAX_PRIORITY)],
)
def test_request_priority_maps_to_wire_priority(priority: int, on_the_wire: int) -> None:
    assert wire_priority(priority) == on_the_wire

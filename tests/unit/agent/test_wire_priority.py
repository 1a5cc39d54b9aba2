from __future__ import annotations

import pytest

from prfaas.agent.links import ORDINARY, wire_priority
from prfaas.transport.sender.chunker import MAX_PRIORITY


@pytest.mark.parametrize(
    ("priority", "on_the_wire"),
    [(0, ORDINARY), (-1, 2), (-3, 0), (-(2**63), 0), (1, 4), (4, MAX_PRIORITY), (2**63 - 1, MAX_PRIORITY)],
)
def test_request_priority_maps_to_wire_priority(priority: int, on_the_wire: int) -> None:
    assert wire_priority(priority) == on_the_wire

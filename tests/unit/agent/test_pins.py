"""Pins of operators, and their ends."""

from __future__ import annotations

from prfaas.agent.prefix.pins import Pins
from prfaas.types import CopyEnd, PoolCommand, TransferId
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import name
from tests.unit.cachepool.test_pool import Node


def test_pin_ends_when_its_prefix_is_forgotten() -> None:
    node, ends = Node(), list[CopyEnd]()
    node.keep(1, 2)
    pins = Pins(node.pool, None, report=ends.append)
    pins.take(PoolCommand(TransferId(b"c" * 16), name(2), "pin"))
    pins.drop_absent()
    assert [pin["end_hash"] for pin in pins.status()] == [name(2).hex()]
    node.pool.forget("hybrid")
    pins.drop_absent()
    assert pins.status() == []
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 0, "quarantined": 0, "free": 2}
    assert node.pool.stats().num_leases == 0
    check_integrity(node.pool)

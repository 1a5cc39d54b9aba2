"""Removals by operators while blocks are being written to the SSD."""

from __future__ import annotations

from pathlib import Path

from prfaas.agent.prefix.pins import Pins
from prfaas.types import CopyEnd, PoolCommand, TransferId
from tests.support.pool_layouts import name
from tests.support.ssd_tier import Tier


def test_removal_waits_for_blocks_being_written(tmp_path: Path) -> None:
    tier, ends = Tier(tmp_path), list[CopyEnd]()
    pins = Pins(tier.memory, tier.ssd, report=ends.append)
    blocks = [name(number) for number in range(16)]
    tier.keep(blocks)
    tier.ssd.pump()
    pins.take(PoolCommand(TransferId(bytes(16)), blocks[7], "remove"))
    assert not ends, "blocks are being written"
    tier.turn(lambda: bool(ends))
    assert ends[0].outcome == "completed"
    tier.settle()
    assert tier.memory.find_all(tier.arena, 0, blocks) == [None] * 16
    assert not any(map(tier.has, blocks))
    tier.close()
    later = Tier(tmp_path)
    assert not any(map(later.has, blocks)), "what was removed came back with the agent"
    later.close()


def test_blocks_written_during_a_waiting_removal_are_removed_too(tmp_path: Path) -> None:
    tier, ends = Tier(tmp_path, memory_slots=64), list[CopyEnd]()
    pins = Pins(tier.memory, tier.ssd, report=ends.append)
    prefix, following = [name(number) for number in range(8)], [name(number) for number in range(8, 48)]
    tier.keep(prefix)
    tier.ssd.pump()
    pins.take(PoolCommand(TransferId(bytes(16)), prefix[-1], "remove"))
    tier.keep(following, parent=prefix[-1], num_tokens=32 * 9)
    assert not ends, "blocks are being written"
    tier.turn(lambda: bool(ends))
    tier.settle()
    assert tier.memory.find_all(tier.arena, 0, prefix + following) == [None] * 48
    assert not any(map(tier.has, prefix + following))
    tier.close()

"""Blocks on the SSD: written behind, read back, evicted, corrupted, restored and forgotten."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from prfaas.cachepool import ssd
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.errors import ConfigError
from prfaas.pool_events import BlockRemoved, BlockStored
from prfaas.types import BlockHash
from tests.support.pool_layouts import ROOT, name
from tests.support.ssd_tier import BLOCK_TOKENS, LAYOUT, SLOT_BYTES, Tier, content_of

STATE = 1
MANY_BYTES = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(tmp_path)
    yield tier
    tier.close()


def _names(first: int, end: int) -> list[BlockHash]:
    return [name(number) for number in range(first, end)]


def test_every_block_is_announced_once_with_its_parent(tier: Tier) -> None:
    tier.keep(_names(0, 3))
    tier.keep([name(2)], group=STATE, parent=name(2), num_tokens=96)
    tier.settle()
    told = {(e.group, e.block_hash, e.parent, e.num_tokens) for e in tier.events if isinstance(e, BlockStored)}
    assert told == {
        (0, name(0), ROOT, 32),
        (0, name(1), name(0), 64),
        (0, name(2), name(1), 96),
        (STATE, name(2), name(2), 96),
    }
    assert len(tier.events) == 4
    assert {event.tier for event in tier.events} == {"ssd"}


def test_a_restart_restores_all_blocks(tmp_path: Path) -> None:
    first = Tier(tmp_path)
    first.keep(_names(0, 10))
    first.keep([name(9)], group=STATE, parent=name(9), num_tokens=320)
    first.settle()
    first.close()
    second = Tier(tmp_path)
    told = [event for event in second.events if isinstance(event, BlockStored)]
    assert {(event.group, event.block_hash) for event in told} == {(0, block_hash) for block_hash in _names(0, 10)} | {
        (STATE, name(9))
    }
    (arena,) = second.ssd.pool.arenas
    assert second.ssd.pool.states_after(arena, STATE, name(9)) == {name(9): 320}
    assert second.read(name(7)) == content_of(name(7))
    second.close()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = Tier(tmp_path)
    with pytest.raises(ConfigError, match="another agent uses it"):
        Tier(tmp_path)
    first.close()
    Tier(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        Tier(tmp_path / "file" / "ssd")


def test_a_full_ssd_evicts_from_the_tails_of_chains(tmp_path: Path) -> None:
    tier = Tier(tmp_path, ssd_slots=24)
    for first in range(0, 300, 10):
        tier.keep(_names(first, first + 10))
        tier.settle()
    removed = [event.block_hash for event in tier.events if isinstance(event, BlockRemoved)]
    assert removed[:3] == [name(9), name(8), name(7)]
    assert tier.read(name(299)) == content_of(name(299))
    assert not tier.has(name(9))
    tier.close()


def test_a_corrupted_block_is_not_served_even_after_a_restart(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.keep(_names(0, 4))
    tier.settle()
    blocks = tmp_path / f"{LAYOUT.fingerprint.hex()}.blocks"
    with blocks.open("r+b") as file:
        where = file.read(MANY_BYTES).find(content_of(name(2)))
        file.seek(where + SLOT_BYTES // 2)
        file.write(b"rotten")
    assert tier.read(name(2)) is None
    assert not tier.has(name(2))
    assert tier.events[-1] == BlockRemoved(LAYOUT.fingerprint, 0, name(2), "ssd")
    assert tier.read(name(3)) == content_of(name(3))
    tier.close()
    again = Tier(tmp_path)
    assert [again.has(block_hash) for block_hash in _names(0, 4)] == [True, True, False, True]
    again.close()


def test_blocks_evicted_before_their_turn_are_not_written(tmp_path: Path) -> None:
    tier = Tier(tmp_path, memory_slots=8)
    tier.keep(_names(0, 8))
    tier.keep(_names(100, 108))
    tier.settle()
    assert [tier.has(block_hash) for block_hash in _names(0, 8)] == [False] * 8
    assert tier.read(name(107)) == content_of(name(107))
    tier.close()


def test_writing_a_block_does_not_count_as_a_use(tmp_path: Path) -> None:
    tier = Tier(tmp_path, memory_slots=8)
    tier.keep(_names(0, 4))
    tier.keep(_names(10, 14))
    tier.ask(_names(0, 4))
    tier.settle()
    tier.keep(_names(20, 24))
    held = [n for n in (*range(4), *range(10, 14)) if tier.memory.find(tier.arena, 0, name(n)) is not None]
    assert held == [0, 1, 2, 3]
    tier.close()


def test_a_spent_write_budget_delays_the_next_block(tmp_path: Path) -> None:
    tier = Tier(tmp_path, write_bytes_per_second=1.0)
    tier.keep(_names(0, 4))
    tier.turn(lambda: tier.has(name(0)))
    tier.ssd.pump()
    assert [tier.has(block_hash) for block_hash in _names(0, 4)] == [True, False, False, False]
    assert not tier.ssd.is_idle()
    tier.close()


def test_a_failing_disk_costs_blocks_only(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    in_the_way = tmp_path / f"{LAYOUT.fingerprint.hex()}.blocks"
    in_the_way.mkdir()
    before = _num_failures()
    tier.keep(_names(0, 4))
    tier.settle()
    assert _num_failures() == before + 4
    assert not list(tmp_path.glob(".new-*"))
    in_the_way.rmdir()
    tier.keep(_names(10, 14))
    tier.settle()
    assert [tier.has(block_hash) for block_hash in (name(0), name(10))] == [False, True]
    tier.close()


def _num_failures() -> float:
    return REGISTRY.get_sample_value("prfaas_agent_ssd_failures_total", {"reason": "write"}) or 0.0


def test_unreadable_files_do_not_stop_the_restore_of_others(tmp_path: Path) -> None:
    first = Tier(tmp_path)
    first.keep(_names(0, 4))
    first.settle()
    first.close()
    records = tmp_path / f"{LAYOUT.fingerprint.hex()}.records"
    records.unlink()
    records.mkdir()
    again = Tier(tmp_path)
    assert not again.has(name(0))
    again.close()


def test_an_ssd_too_small_for_one_block_stays_empty(tmp_path: Path) -> None:
    tier = Tier(tmp_path, ssd_slots=19)
    tier.keep(_names(0, 4))
    tier.settle()
    assert not tier.has(name(0))
    tier.close()


def test_forgetting_a_model_waits_for_reads_and_fails_pending_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd, "NUM_THREADS", 2)
    tier, answers, ends = Tier(tmp_path / "ssd", ssd_slots=40), list[bool](), list[str]()
    tier.keep(_names(0, 8))
    tier.settle()
    for block_hash in _names(0, 8):
        into = memoryview(bytearray(SLOT_BYTES))
        assert tier.ssd.read(LAYOUT, BlockIdentity(0, block_hash, ROOT, BLOCK_TOKENS, ROOT), into, answers.append)
    tier.ssd.pump()
    tier.memory.forget(LAYOUT.model)
    tier.ssd.forget(LAYOUT.model, lambda: ends.append("forgotten"))
    assert (answers, ends) == ([False] * 6, []), "two are being read"
    tier.turn(lambda: bool(ends))
    assert answers == [False] * 8
    shutil.copytree(tmp_path / "ssd", tmp_path / "as if killed")
    after = Tier(tmp_path / "as if killed", ssd_slots=40)
    assert not any(map(after.has, _names(0, 8)))
    after.close()
    tier.close()

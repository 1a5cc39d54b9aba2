"""Forgotten models: blocks computed before are found on no tier, by no engine."""

import os
from pathlib import Path

import pytest

from prfaas.agent.engine.protocol import (
    Cancel,
    Forget,
    Forgotten,
    Hold,
    ReceiveReady,
    Release,
    TransferDone,
    TransferFailed,
)
from prfaas.types import TransferId
from tests.support.agents import MODEL, NUM_TOKENS, Agents, Engine, block_ssd, chain_of, exact_blocks, layout
from tests.support.waiting import wait_until

# Six full blocks, a partial block and a state for each prompt.
NUM_BLOCKS = 8
LONGER = chain_of(length=NUM_TOKENS + 50)


def _forget(engine: Engine, model: str = MODEL) -> None:
    order = TransferId(os.urandom(16))
    engine.scheduler.post(Forget(order, model))
    assert engine.wait(Forgotten) == Forgotten(order)


def test_forgotten_model_is_not_found_and_others_are(agents: Agents) -> None:
    west = agents.start("west")
    first, second = agents.engine(west, "w"), agents.engine(west, "v")
    second_engine = agents.engine(west, "o", layout(model="other"))
    for engine in (first, second_engine):
        engine.store(chain_of())
    wait_until(lambda: west.pool()["prefix"] == 2 * NUM_BLOCKS)
    _forget(second)
    assert first.lengths(LONGER) == second.lengths(LONGER) == []
    assert isinstance(first.hold(chain_of()), TransferFailed)
    assert isinstance(second_engine.hold(chain_of()), ReceiveReady)
    assert west.pool()["prefix"] == NUM_BLOCKS
    first.store(chain_of(), seed=1)
    wait_until(lambda: west.pool()["prefix"] == 2 * NUM_BLOCKS)
    ready = second.hold(chain_of())
    assert isinstance(ready, ReceiveReady)
    second.assert_content(ready, seed=1)


def test_blocks_being_read_stay_until_released(agents: Agents) -> None:
    west = agents.start("west")
    reader, second_engine = agents.engine(west, "w"), agents.engine(west, "v")
    reader.store(chain_of())
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS)
    ready = reader.hold(chain_of())
    assert isinstance(ready, ReceiveReady)
    _forget(second_engine)
    assert (west.pool()["prefix"], west.pool()["quarantined"]) == (0, NUM_BLOCKS)
    second_engine.store(chain_of(), seed=1)
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS)
    reader.assert_content(ready)
    assert ready.generations[0][0] == [reader.workers[0].slot_generations()[slot] for slot in ready.slots[0][0]]
    reader.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: west.pool()["quarantined"] == 0)


def test_unclaimed_inbound_transfer_is_cancelled(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    transfer_id, grant = agents.grant("east", west, chain_of())
    sender.write_all(sender.open_send(transfer_id, grant, chain_of()))
    sender.wait(TransferDone)
    _forget(receiver)
    receiver.claim(transfer_id, grant, chain_of())
    receiver.fails("cancelled")
    sender.scheduler.post(Cancel(transfer_id))
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] + west.pool()["quarantined"] == 0)
    assert west.pool()["prefix"] == 0


def test_ssd_forgets_the_model_across_restarts(agents: Agents, tmp_path: Path) -> None:
    settings = {"pool-bytes": "4MiB", "ssd-directory": str(tmp_path / "ssd")}
    first = agents.start("west", **settings)
    engine = agents.engine(first, "w")
    engine.store(chain_of())
    wait_until(lambda: first.status_page()["ssd"]["prefix"] == NUM_BLOCKS)
    _forget(engine)
    assert first.status_page()["ssd"]["prefix"] == 0
    assert engine.lengths(LONGER) == []
    first.stop()
    second = agents.start("east", **settings)
    assert second.status_page()["ssd"]["prefix"] == 0
    assert agents.engine(second, "w").lengths(LONGER) == []


def test_engine_waiting_for_the_ssd_is_told_of_the_eviction(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"pool-bytes": "4MiB", "ssd-directory": str(tmp_path / "ssd")}
    first = agents.start("west", **settings)
    agents.engine(first, "w").store(chain_of())
    wait_until(lambda: first.status_page()["ssd"]["prefix"] == NUM_BLOCKS)
    first.stop()
    second = agents.start("east", **settings)
    waiting, second_engine = agents.engine(second, "w"), agents.engine(second, "v")
    block_ssd(monkeypatch, wait_seconds=3600.0)
    waiting.scheduler.post(Hold(TransferId(os.urandom(16)), NUM_TOKENS, exact_blocks(chain_of())))
    wait_until(lambda: second.pool()["transfer"] > 0)
    _forget(second_engine)
    waiting.fails("evicted")
    assert waiting.lengths(LONGER) == []
    kinds = second.status_page()
    assert (kinds["pool"]["transfer"], kinds["ssd"]["prefix"], kinds["ssd"]["quarantined"]) == (0, 0, 0)

"""A model that an agent forgets: nobody finds what was computed before, on whatever tier, of whichever engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prfaas.agent.engine.protocol import (
    Cancel,
    Forget,
    Forgotten,
    Hold,
    Receive,
    ReceiveReady,
    Release,
    Send,
    SendOpened,
    Store,
    TransferDone,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.types import TransferId
from tests.integration.agent.test_prefix_store import exact_blocks, hold, lookup, store
from tests.support.agents import MODEL, NUM_TOKENS, Agents, Engine, blocks, chain_of, layout, slow_ssd
from tests.support.waiting import wait_until
from tools.demo.client import get_json

NUM_BLOCKS = 8  # of a chain: six full ones, a tail, a state
LONGER = chain_of(length=NUM_TOKENS + 50)


def _forget(engine: Engine, model: str = MODEL) -> None:
    order = TransferId(os.urandom(16))
    engine.scheduler.post(Forget(order, model))
    assert engine.wait(Forgotten) == Forgotten(order)


def test_forgotten_model_is_not_found_and_others_are(agents: Agents) -> None:
    west = agents.start("west")
    first, second = agents.engine(west, "w"), agents.engine(west, "v")
    other = agents.engine(west, "o", layout(model="other"))
    for engine in (first, other):
        store(engine, chain_of())
    wait_until(lambda: west.pool()["prefix"] == 2 * NUM_BLOCKS)
    _forget(second)
    assert lookup(first, LONGER) == lookup(second, LONGER) == []
    assert isinstance(hold(first, chain_of()), TransferFailed)
    assert isinstance(hold(other, chain_of()), ReceiveReady)
    assert west.pool()["prefix"] == NUM_BLOCKS
    store(first, chain_of(), seed=1)
    wait_until(lambda: west.pool()["prefix"] == 2 * NUM_BLOCKS)
    ready = hold(second, chain_of())
    assert isinstance(ready, ReceiveReady)
    second.assert_content(ready, seed=1)


def test_blocks_being_read_stay_until_released(agents: Agents) -> None:
    west = agents.start("west")
    reader, other = agents.engine(west, "w"), agents.engine(west, "v")
    store(reader, chain_of())
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS)
    ready = hold(reader, chain_of())
    assert isinstance(ready, ReceiveReady)
    _forget(other)
    assert (west.pool()["prefix"], west.pool()["quarantined"]) == (0, NUM_BLOCKS)
    store(other, chain_of(), seed=1)
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS)
    reader.assert_content(ready)
    assert ready.generations[0][0] == [reader.worker.slot_generations()[slot] for slot in ready.slots[0][0]]
    reader.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: west.pool()["quarantined"] == 0)


def test_blocks_being_stored_are_not_kept(agents: Agents) -> None:
    west = agents.start("west")
    engine, other = agents.engine(west, "w"), agents.engine(west, "v")
    transfer_id = TransferId(os.urandom(16))
    engine.scheduler.post(Store(transfer_id, NUM_TOKENS, exact_blocks(chain_of())))
    opened = engine.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    engine.write_layer(opened, 0, 0, blocks=range(7))
    _forget(other)
    engine.write_all(opened)
    assert engine.worker.ring is not None
    engine.worker.ring.push(RingEntry(EntryKind.REQUEST_ENDED, opened.handle))
    wait_until(lambda: west.pool()["transfer"] == 0)
    assert west.pool()["prefix"] == 0
    assert lookup(engine, LONGER) == []


def test_unclaimed_inbound_transfer_is_cancelled(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    sender, receiver = agents.engine(east, "e"), agents.engine(west, "w")
    transfer_id, grant = agents.grant("east", west, chain_of())
    sender.scheduler.post(Send(transfer_id, grant, blocks(chain_of(), NUM_TOKENS)))
    opened = sender.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    sender.write_all(opened)
    sender.wait(TransferDone)
    _forget(receiver)
    claim = Receive(transfer_id, grant, chain_of().at(NUM_TOKENS), blocks(chain_of(), NUM_TOKENS))
    receiver.scheduler.post(claim)
    failed = receiver.wait(TransferFailed)
    assert isinstance(failed, TransferFailed) and failed.reason == "cancelled"
    sender.scheduler.post(Cancel(transfer_id))
    wait_until(lambda: east.pool()["transfer"] == west.pool()["transfer"] + west.pool()["quarantined"] == 0)
    assert west.pool()["prefix"] == 0


def test_ssd_forgets_the_model_across_restarts(agents: Agents, tmp_path: Path) -> None:
    settings = {"pool-bytes": "4MiB", "ssd-directory": str(tmp_path / "ssd")}
    first = agents.start("west", **settings)
    engine = agents.engine(first, "w")
    store(engine, chain_of())
    wait_until(lambda: get_json(f"http://{first.status}/status")["ssd"]["prefix"] == NUM_BLOCKS)
    _forget(engine)
    assert get_json(f"http://{first.status}/status")["ssd"]["prefix"] == 0
    assert lookup(engine, LONGER) == []
    first.stop()
    second = agents.start("east", **settings)
    assert get_json(f"http://{second.status}/status")["ssd"]["prefix"] == 0
    assert lookup(agents.engine(second, "w"), LONGER) == []


def test_engine_waiting_for_the_ssd_is_told_of_the_eviction(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"pool-bytes": "4MiB", "ssd-directory": str(tmp_path / "ssd")}
    first = agents.start("west", **settings)
    store(agents.engine(first, "w"), chain_of())
    wait_until(lambda: get_json(f"http://{first.status}/status")["ssd"]["prefix"] == NUM_BLOCKS)
    first.stop()
    slow_ssd(monkeypatch, wait_seconds=3600.0)
    second = agents.start("east", **settings)
    waiting, other = agents.engine(second, "w"), agents.engine(second, "v")
    waiting.scheduler.post(Hold(TransferId(os.urandom(16)), NUM_TOKENS, exact_blocks(chain_of())))
    wait_until(lambda: second.pool()["transfer"] > 0)
    _forget(other)
    failed = waiting.wait(TransferFailed)
    assert isinstance(failed, TransferFailed) and failed.reason == "evicted"
    assert lookup(waiting, LONGER) == []
    kinds = get_json(f"http://{second.status}/status")
    assert (kinds["pool"]["transfer"], kinds["ssd"]["prefix"], kinds["ssd"]["quarantined"]) == (0, 0, 0)

"""Blocks that an engine leaves in its agent's pool are found again, whole and at the right length."""

from __future__ import annotations

import os

import pytest

from prfaas.agent.engine.protocol import (
    Cancel,
    Hold,
    LookedUp,
    Lookup,
    ReceiveReady,
    Release,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.hashing import HashChain, root_hash
from prfaas.types import GroupBlocks, TransferId
from tests.support.agents import (
    MODEL,
    NUM_TOKENS,
    ROOT,
    Agents,
    Engine,
    chain_of,
    layout,
)
from tests.support.waiting import wait_until
from tools.demo.client import get_json


def exact_blocks(chain: HashChain) -> tuple[GroupBlocks, ...]:
    """As `blocks`, with the partial last block named by the exact length it ends at."""
    full = chain.blocks(32, first_block=0, num_tokens=chain.num_tokens)
    tail = (*full[:-1], chain.at(chain.num_tokens)) if chain.num_tokens % 32 else full
    unit = chain.num_tokens // 16 * 16
    return GroupBlocks(0, 0, tail, chain.root), GroupBlocks(1, 0, (chain.at(chain.num_tokens),), chain.at(unit))


def store(engine: Engine, chain: HashChain, *, seed: int = 0) -> None:
    transfer_id = TransferId(os.urandom(16))
    engine.scheduler.post(Store(transfer_id, chain.num_tokens, exact_blocks(chain)))
    opened = engine.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    engine.write_all(opened, seed=seed)
    assert engine.worker.ring is not None
    engine.worker.ring.push(RingEntry(EntryKind.REQUEST_ENDED, opened.handle))


def ask(engine: Engine, chain: HashChain, *, promised_tokens: int = 0) -> LookedUp:
    units = b"".join(chain.units)
    engine.scheduler.post(Lookup(TransferId(os.urandom(16)), chain.root, units, chain.num_tokens - 1, promised_tokens))
    found = engine.wait(LookedUp)
    assert isinstance(found, LookedUp)
    return found


def lookup(engine: Engine, chain: HashChain) -> list[list[object]]:
    return ask(engine, chain).lengths


def hold(engine: Engine, chain: HashChain) -> ReceiveReady | TransferFailed:
    engine.scheduler.post(Hold(TransferId(os.urandom(16)), chain.num_tokens, exact_blocks(chain)))
    answer = engine.wait((ReceiveReady, TransferFailed))
    assert isinstance(answer, ReceiveReady | TransferFailed)
    return answer


def test_stored_prompt_is_found_at_its_exact_length(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    store(engine, chain_of())
    wait_until(lambda: west.pool()["transfer"] == 0)
    longer = chain_of(length=NUM_TOKENS + 100)
    assert lookup(engine, longer) == [[NUM_TOKENS, chain_of().at(NUM_TOKENS)]]
    ready = hold(engine, chain_of())
    assert isinstance(ready, ReceiveReady)
    engine.assert_content(ready)
    engine.scheduler.post(Release(ready.transfer_id))


def test_broken_promise_is_explained_by_kv_kind(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    store(engine, chain_of())
    wait_until(lambda: west.pool()["transfer"] == 0)
    full = NUM_TOKENS // 32 * 32
    assert ask(engine, chain_of(length=NUM_TOKENS + 100), promised_tokens=NUM_TOKENS).held_tokens is None
    longer = ask(engine, chain_of(length=NUM_TOKENS + 100), promised_tokens=NUM_TOKENS + 50)
    assert longer.held_tokens == [["full_attention", full], ["linear_state", NUM_TOKENS]]
    before_the_state = ask(engine, chain_of(length=full + 1), promised_tokens=full)
    assert before_the_state.lengths == []
    assert before_the_state.held_tokens == [["full_attention", full], ["linear_state", 0]]


def test_other_prompt_with_the_same_start_does_not_match(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    store(engine, chain_of())
    wait_until(lambda: west.pool()["transfer"] == 0)
    other = HashChain(ROOT, [*range(NUM_TOKENS - 3), *range(5000, 5100)])
    candidates = lookup(engine, other)
    assert candidates and all(other.at(int(str(length))) != block_hash for length, block_hash in candidates)


def test_incomplete_store_is_not_offered(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    chain = chain_of()
    transfer_id = TransferId(os.urandom(16))
    engine.scheduler.post(Store(transfer_id, chain.num_tokens, exact_blocks(chain)))
    opened = engine.wait(SendOpened)
    assert isinstance(opened, SendOpened)
    engine.write_layer(opened, 0, 0, blocks=range(7))  # one of two layers
    engine.write_layer(opened, 1, 0, blocks=range(1))
    engine.scheduler.post(Cancel(transfer_id))
    wait_until(lambda: west.pool()["transfer"] == 0)
    assert lookup(engine, chain_of(length=NUM_TOKENS + 10)) == []
    answer = hold(engine, chain)
    assert isinstance(answer, TransferFailed) and answer.reason == "evicted"


def test_engine_that_dies_during_a_store_leaks_nothing(agents: Agents) -> None:
    west = agents.start("west")
    engine, witness = agents.engine(west, "w"), agents.engine(west, "v")
    chain = chain_of()
    engine.scheduler.post(Store(TransferId(os.urandom(16)), chain.num_tokens, exact_blocks(chain)))
    engine.wait(SendOpened)
    assert west.pool()["transfer"] > 0
    engine.close()
    wait_until(lambda: west.pool()["transfer"] == 0)
    assert lookup(witness, chain_of(length=NUM_TOKENS + 10)) == []


@pytest.mark.parametrize("num_units", [0, 1, 12])
def test_lookup_of_an_unknown_prompt_finds_nothing(agents: Agents, num_units: int) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    assert lookup(engine, HashChain(ROOT, range(16 * num_units + 1))) == []
    assert layout().groups[1].is_state


def test_tenant_stays_within_its_share(agents: Agents) -> None:
    west = agents.start("west", **{"pool-bytes": "8MiB", "tenants": "[{tenant: acme, ratio: 0.25}]"})
    engine = agents.engine(west, "w")
    store(engine, chain_of())
    acme = [HashChain(root_hash(MODEL, b"acme"), range(1000 * n, 1000 * n + NUM_TOKENS)) for n in range(6)]
    for chain in acme:
        store(engine, chain)
        wait_until(lambda: west.pool()["transfer"] == 0)
    held = get_json(f"http://{west.status}/status")["tenant_bytes"]["acme"]
    assert 0 < held <= (4 << 20) * 0.25
    assert isinstance(hold(engine, chain_of()), ReceiveReady)
    assert isinstance(hold(engine, acme[0]), TransferFailed)
    assert isinstance(hold(engine, acme[-1]), ReceiveReady)

"""Blocks that an engine stores are found again, complete and at the right length."""

import pytest

from prfaas.agent.engine.protocol import Cancel, ReceiveReady, Release, TransferFailed
from prfaas.hashing import HashChain, root_hash
from tests.support.agents import MODEL, NUM_TOKENS, ROOT, Agents, chain_of
from tests.support.waiting import wait_until


def test_stored_prompt_is_found_at_its_exact_length(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    engine.store(chain_of())
    wait_until(lambda: west.pool()["transfer"] == 0)
    longer = chain_of(length=NUM_TOKENS + 100)
    assert engine.lengths(longer) == [[NUM_TOKENS, chain_of().at(NUM_TOKENS)]]
    ready = engine.hold(chain_of())
    assert isinstance(ready, ReceiveReady)
    engine.assert_content(ready)
    engine.scheduler.post(Release(ready.transfer_id))


def test_other_prompt_with_the_same_start_does_not_match(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    engine.store(chain_of())
    wait_until(lambda: west.pool()["transfer"] == 0)
    prompt = HashChain(ROOT, [*range(NUM_TOKENS - 3), *range(5000, 5100)])
    candidates = engine.lengths(prompt)
    assert candidates and all(prompt.at(int(str(length))) != block_hash for length, block_hash in candidates)


def test_incomplete_store_is_not_offered(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    chain = chain_of()
    opened = engine.open_store(chain)
    # The blocks have two layers.
    engine.write_layer(opened, 0, 0, blocks=range(7))
    engine.write_layer(opened, 1, 0, blocks=range(1))
    engine.scheduler.post(Cancel(opened.transfer_id))
    wait_until(lambda: west.pool()["transfer"] == 0)
    assert engine.lengths(chain_of(length=NUM_TOKENS + 10)) == []
    answer = engine.hold(chain)
    assert isinstance(answer, TransferFailed) and answer.reason == "evicted"


def test_engine_that_dies_during_a_store_leaks_nothing(agents: Agents) -> None:
    west = agents.start("west")
    engine, witness = agents.engine(west, "w"), agents.engine(west, "v")
    chain = chain_of()
    engine.open_store(chain)
    assert west.pool()["transfer"] > 0
    engine.close()
    wait_until(lambda: west.pool()["transfer"] == 0)
    assert witness.lengths(chain_of(length=NUM_TOKENS + 10)) == []


@pytest.mark.parametrize("num_units", [0, 1, 12])
def test_lookup_of_an_unknown_prompt_finds_nothing(agents: Agents, num_units: int) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    assert engine.lengths(HashChain(ROOT, range(16 * num_units + 1))) == []


def test_tenant_stays_within_its_share(agents: Agents) -> None:
    west = agents.start("west", **{"pool-bytes": "8MiB", "tenants": "[{tenant: acme, ratio: 0.25}]"})
    engine = agents.engine(west, "w")
    engine.store(chain_of())
    acme = [HashChain(root_hash(MODEL, b"acme"), range(1000 * n, 1000 * n + NUM_TOKENS)) for n in range(6)]
    for chain in acme:
        engine.store(chain)
        wait_until(lambda: west.pool()["transfer"] == 0)
    held = west.status_page()["tenant_bytes"]["acme"]
    assert 0 < held <= (4 << 20) * 0.25
    assert isinstance(engine.hold(chain_of()), ReceiveReady)
    assert isinstance(engine.hold(acme[0]), TransferFailed)
    assert isinstance(engine.hold(acme[-1]), ReceiveReady)

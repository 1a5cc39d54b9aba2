"""Agents with an SSD: engines read blocks that memory evicted or that a dead agent left."""

import os
import urllib.request
from pathlib import Path

import pytest

from prfaas.agent.engine.protocol import Cancel, Hold, ReceiveReady, Release, TransferFailed
from prfaas.hashing import HashChain
from prfaas.types import TransferId
from tests.support.agents import NUM_TOKENS, ROOT, Agents, Engine, RunningAgent, block_ssd, exact_blocks, layout
from tests.support.waiting import PATIENCE_SECONDS, wait_until

# Six full blocks, a partial block and a state for each prompt.
BLOCKS_PER_CHAIN = 8
# Memory holds three fewer.
NUM_CHAINS = 8


def _chain(number: int, *, more: int = 0) -> HashChain:
    return HashChain(ROOT, range(1000 * number, 1000 * number + NUM_TOKENS + more))


def _num_on_ssd(agent: RunningAgent) -> int:
    return int(agent.status_page()["ssd"]["prefix"])


def _bytes_read(agent: RunningAgent) -> float:
    with urllib.request.urlopen(f"http://{agent.status}/metrics", timeout=PATIENCE_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith('prfaas_agent_ssd_bytes_total{direction="read"')
    )


def _start(agents: Agents, name: str, directory: Path, **settings: str) -> tuple[RunningAgent, Engine]:
    agent = agents.start(name, **{"pool-bytes": "4MiB", "ssd-directory": str(directory), **settings})
    return agent, agents.engine(agent, "w")


def _fill(agent: RunningAgent, engine: Engine, num_chains: int = NUM_CHAINS) -> None:
    """Store prompts, by default more than memory holds, and wait for each until it is on the SSD."""
    for number in range(num_chains):
        engine.store(_chain(number), seed=number)
        wait_until(lambda number=number: _num_on_ssd(agent) == BLOCKS_PER_CHAIN * (number + 1))  # type: ignore[misc]


def _read(engine: Engine, number: int) -> None:
    chain = _chain(number)
    assert [NUM_TOKENS, chain.at(NUM_TOKENS)] in engine.lengths(_chain(number, more=50))
    ready = engine.hold(chain)
    assert isinstance(ready, ReceiveReady)
    engine.assert_content(ready, seed=number)
    engine.scheduler.post(Release(ready.transfer_id))


def test_blocks_evicted_from_memory_come_back_from_the_ssd(agents: Agents, tmp_path: Path) -> None:
    agent, engine = _start(agents, "west", tmp_path / "ssd")
    _fill(agent, engine)
    assert agent.pool()["prefix"] < NUM_CHAINS * BLOCKS_PER_CHAIN
    before = _bytes_read(agent)
    for number in range(NUM_CHAINS):
        _read(engine, number)
    assert _bytes_read(agent) > before
    wait_until(lambda: agent.pool()["transfer"] == 0)


def test_prefix_with_a_corrupt_block_is_refused(agents: Agents, tmp_path: Path) -> None:
    first, engine = _start(agents, "west", tmp_path / "ssd")
    _fill(first, engine, 1)
    first.stop()
    os.truncate(tmp_path / "ssd" / f"{layout().fingerprint.hex()}.blocks", 0)
    second, engine = _start(agents, "east", tmp_path / "ssd")
    answer = engine.hold(_chain(0))
    assert isinstance(answer, TransferFailed) and answer.reason == "evicted"
    wait_until(lambda: engine.lengths(_chain(0, more=50)) == [])
    wait_until(lambda: second.pool()["transfer"] == 0)


@pytest.mark.parametrize("is_patient", [True, False])
def test_engine_gives_up_on_a_block_ssd_without_leaks(
    agents: Agents, tmp_path: Path, is_patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, engine = _start(agents, "west", tmp_path / "ssd")
    _fill(first, engine, 1)
    first.stop()
    second, engine = _start(agents, "east", tmp_path / "ssd")
    block_ssd(monkeypatch, wait_seconds=0.1 if is_patient else 3600.0)
    chain, transfer_id = _chain(0), TransferId(os.urandom(16))
    engine.scheduler.post(Hold(transfer_id, chain.num_tokens, exact_blocks(chain)))
    if is_patient:
        engine.fails("evicted")
    else:
        wait_until(lambda: second.pool()["transfer"] > 0)
        engine.scheduler.post(Cancel(transfer_id))
    wait_until(lambda: second.pool()["transfer"] == 0)

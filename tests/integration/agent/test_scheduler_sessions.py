"""A scheduler that loses its connection beside living workers: they may write to its slots until they say which they do not."""

from __future__ import annotations

import os

from prfaas.agent.engine.protocol import Send, SendOpened, Store
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.types import TransferId
from tests.integration.agent.test_prefix_store import exact_blocks, store
from tests.support.agents import NUM_TOKENS, Agents, Engine, RunningAgent, blocks, chain_of
from tests.support.waiting import wait_until
from tools.demo.client import get_json

NUM_BLOCKS = 8  # of a chain: six full ones, a tail, a state


def _begin_store(engine: Engine) -> None:
    engine.scheduler.post(Store(TransferId(os.urandom(16)), NUM_TOKENS, exact_blocks(chain_of(first=5000))))
    engine.wait(SendOpened)


def _push_back(engine: Engine, session: int) -> None:
    assert engine.worker.ring is not None
    assert engine.worker.ring.push(RingEntry(EntryKind.SCHEDULER_REATTACHED, session))


def _num_sending(agent: RunningAgent) -> int:
    return int(get_json(f"http://{agent.status}/status")["sending"])


def test_reattached_scheduler_replaces_its_earlier_connection(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    _begin_store(engine)
    earlier = engine.scheduler
    engine.attach_scheduler()
    assert get_json(f"http://{west.status}/status")["engines"] == ["w/worker/0", "w/scheduler/0"]
    wait_until(lambda: not earlier.poll() and not earlier.connected)
    assert west.pool()["transfer"] == NUM_BLOCKS
    _push_back(engine, engine.scheduler.attached.session)
    wait_until(lambda: west.pool()["transfer"] == 0)
    earlier.close()


def test_workers_report_covers_only_earlier_sessions(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    engine = agents.engine(west, "w")
    engine.scheduler.close()
    engine.attach_scheduler()
    session = engine.scheduler.attached.session
    _begin_store(engine)
    transfer_id, grant = agents.grant("west", east, chain_of())
    engine.scheduler.post(Send(transfer_id, grant, blocks(chain_of(), NUM_TOKENS)))
    engine.wait(SendOpened)
    num_slots = west.pool()["transfer"]
    engine.scheduler.close()
    engine.attach_scheduler()
    _push_back(engine, session)
    store(engine, chain_of())
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS, what="the entries of the ring")
    assert west.pool()["transfer"] == num_slots
    assert _num_sending(west) == 1
    _push_back(engine, engine.scheduler.attached.session)
    wait_until(lambda: west.pool()["transfer"] == _num_sending(west) == 0)


def test_restarted_engine_starts_a_new_session_count(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    engine.scheduler.close()
    engine.attach_scheduler()
    assert engine.scheduler.attached.session == 1
    engine.close()
    wait_until(lambda: not get_json(f"http://{west.status}/status")["engines"])
    assert agents.engine(west, "w").scheduler.attached.session == 0

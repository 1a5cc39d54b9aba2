"""Schedulers that attach again beside living workers: slots stay until the workers report that they stopped."""

from prfaas.agent.engine.ring import EntryKind, RingEntry
from tests.support.agents import Agents, Engine, RunningAgent, chain_of
from tests.support.waiting import wait_until

# Six full blocks, a partial block and a state for each prompt.
NUM_BLOCKS = 8


def _report_reattached(engine: Engine, session: int) -> None:
    engine.push(RingEntry(EntryKind.SCHEDULER_REATTACHED, session))


def _num_sending(agent: RunningAgent) -> int:
    return int(agent.status_page()["sending"])


def test_reattached_scheduler_replaces_its_earlier_connection(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    engine.open_store(chain_of(first=5000))
    earlier = engine.scheduler
    engine.attach_scheduler()
    wait_until(lambda: not earlier.poll() and not earlier.connected)
    wait_until(lambda: west.status_page()["engines"] == ["w/worker/0", "w/scheduler/0"])
    assert west.pool()["transfer"] == NUM_BLOCKS
    _report_reattached(engine, engine.scheduler.attached.session)
    wait_until(lambda: west.pool()["transfer"] == 0)


def test_workers_report_covers_only_earlier_sessions(agents: Agents) -> None:
    east, west = agents.start("east"), agents.start("west")
    engine = agents.engine(west, "w")
    engine.scheduler.close()
    engine.attach_scheduler()
    session = engine.scheduler.attached.session
    engine.open_store(chain_of(first=5000))
    transfer_id, grant = agents.grant("west", east, chain_of())
    engine.open_send(transfer_id, grant, chain_of())
    num_slots = west.pool()["transfer"]
    engine.scheduler.close()
    engine.attach_scheduler()
    _report_reattached(engine, session)
    engine.store(chain_of())
    wait_until(lambda: west.pool()["prefix"] == NUM_BLOCKS, what="the entries of the ring")
    assert west.pool()["transfer"] == num_slots
    assert _num_sending(west) == 1
    _report_reattached(engine, engine.scheduler.attached.session)
    wait_until(lambda: west.pool()["transfer"] == _num_sending(west) == 0)


def test_restarted_engine_starts_a_new_session_count(agents: Agents) -> None:
    west = agents.start("west")
    engine = agents.engine(west, "w")
    engine.scheduler.close()
    engine.attach_scheduler()
    assert engine.scheduler.attached.session == 1
    engine.close()
    wait_until(lambda: not west.status_page()["engines"])
    assert agents.engine(west, "w").scheduler.attached.session == 0

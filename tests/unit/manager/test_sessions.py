from prfaas.manager.state.instances import REPORT_SECONDS, AssignedLoad
from prfaas.manager.state.sessions import Session, Sessions
from prfaas.types import AgentName, InstanceId

HERE = Session(AgentName("n1"), 100)


def test_session_expires_when_idle() -> None:
    sessions = Sessions(expiry_seconds=10.0)
    sessions.put("t", "s", session=HERE, now=0.0)
    assert sessions.get("t", "s", now=9.9) == HERE
    assert sessions.get("t", "s", now=10.0) is None
    assert sessions.get("other tenant", "s", now=1.0) is None
    assert sessions.get("t", "", now=1.0) is None


def test_idle_sessions_are_dropped_when_others_come() -> None:
    sessions = Sessions(expiry_seconds=10.0)
    sessions.put("t", "old", session=HERE, now=0.0)
    sessions.put("t", "new", session=HERE, now=10.0)
    assert len(sessions) == 1


def test_least_recently_used_session_is_dropped_when_full() -> None:
    sessions = Sessions(expiry_seconds=10.0, max_sessions=2)
    for number, name in enumerate(["a", "b", "a", "c"]):
        sessions.put("t", name, session=HERE, now=float(number))
    assert sessions.get("t", "b", now=4.0) is None
    assert sessions.get("t", "a", now=4.0) == HERE


def test_assignment_counts_until_reports_include_it() -> None:
    load = AssignedLoad()
    load.assign(b"1", [InstanceId("e")], now=0.0)
    load.assign(b"2", [InstanceId("e")], now=1.0)
    assert load.counts(now=1.0).get(InstanceId("e"), 0) == 2
    assert load.counts(now=REPORT_SECONDS).get(InstanceId("e"), 0) == 1
    assert load.counts(now=1.0 + REPORT_SECONDS).get(InstanceId("e"), 0) == 0
    assert load.counts(now=1.0).get(InstanceId("other"), 0) == 0


def test_rerouted_request_counts_at_its_last_instance() -> None:
    load = AssignedLoad()
    load.assign(b"1", [InstanceId("e"), InstanceId("f")], now=0.0)
    load.assign(b"1", [InstanceId("e")], now=0.1)
    assert (load.counts(now=0.2).get(InstanceId("e"), 0), load.counts(now=0.2).get(InstanceId("f"), 0)) == (1, 0)


def test_sessions_are_counted_by_node() -> None:
    sessions = Sessions(expiry_seconds=10.0)
    sessions.put("t", "a", session=HERE, now=0.0)
    sessions.put("t", "b", session=HERE, now=5.0)
    sessions.put("t", "a", session=Session(AgentName("n2"), 200), now=6.0)
    assert sessions.by_agent() == {"n1": 1, "n2": 1}
    assert [(name, idle) for _, name, _, idle in sessions.latest(7.0)] == [("a", 1.0), ("b", 2.0)]
    sessions.expire(15.0)
    assert sessions.by_agent() == {"n2": 1}

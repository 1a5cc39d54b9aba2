"""Reported turns find their decision, and refresh its cell of the PPD table."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from prfaas.manager.routing.decision_log import RecordedDecision
from prfaas.manager.routing.policy import LivePpdTable
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.ppd import FAILED_SECONDS, MIN_TURNS, REFRESH_SECONDS, PpdEntry, PpdTable, to_measured
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

TABLE = PpdTable((PpdEntry("large", "big_paste", 2.0, 0.2, 0.1, 0.01, 0.01),))


def instance(name: str, role: InstanceRole) -> InstanceState:
    return InstanceState(InstanceId(name), ClusterName("west"), "pd", role, AgentName(f"of-{name}"))


NOTHING: Mapping[str, object] = MappingProxyType({})
INSTANCES = (instance("p", "prefill"), instance("d", "decode"))
SNAPSHOT = Snapshot(100_000, INSTANCES, local_policy="ppd", ppd_table=TABLE, requests_per_second=2.0)


def decided(turn: int) -> RecordedDecision:
    facts = RequestFacts(2560, cached_tokens={AgentName("of-d"): 2048}, turn=turn, max_output_tokens=64)
    return RecordedDecision(0.0, "m", "", "s", SNAPSHOT, facts, route(SNAPSHOT, facts))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def table_after(recorded: RecordedDecision, *, changes: Mapping[str, object] = NOTHING) -> PpdTable | None:
    clock = Clock()
    live = LivePpdTable(TABLE, clock=clock)
    assert live.current() == TABLE
    report = pb.ReportRequestsRequest.Answered(status=200, ttft_seconds=0.5, tpot_seconds=0.03, streamed=True)
    for name, value in changes.items():
        setattr(report, name, value)
    for _ in range(MIN_TURNS):
        live.note(recorded, report)
    clock.now += REFRESH_SECONDS
    return live.current()


def test_local_turns_refresh_the_local_side() -> None:
    later = decided(turn=2)
    assert later.decision.reason == "ppd_table_local"
    after = table_after(later)
    assert after is not None and after.entries[0].ppd_ttft_seconds == pytest.approx(0.5)
    assert after.entries[0].pd_ttft_seconds == 0.2


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 400},
        {"streamed": False},
        {"ttft_seconds": 0.0},
        {"ttft_seconds": math.inf},
        {"ttft_seconds": math.nan},
    ],
)
def test_turns_that_the_table_did_not_decide_change_nothing(changes: dict[str, object]) -> None:
    assert table_after(decided(turn=2), changes=changes) == TABLE


@pytest.mark.parametrize("changes", [{"tpot_seconds": 0.0}, {"tpot_seconds": math.nan}])
def test_turn_without_tpot_leaves_tpot_unchanged(changes: dict[str, object]) -> None:
    after = table_after(decided(turn=2), changes=changes)
    assert after is not None and after.entries[0].ppd_ttft_seconds == pytest.approx(0.5)
    assert after.entries[0].ppd_tpot_seconds == 0.01


@pytest.mark.parametrize("changes", [{"fallback": "prefill_late"}, {"status": 503, "ttft_seconds": 0.0}])
def test_failed_turns_make_their_side_worse(changes: dict[str, object]) -> None:
    after = table_after(decided(turn=2), changes=changes)
    assert after is not None and after.entries[0].ppd_ttft_seconds == FAILED_SECONDS


def test_first_turn_changes_nothing() -> None:
    assert decided(turn=1).decision.reason == "ppd_first_turn"
    assert table_after(decided(turn=1)) == TABLE


def test_page_can_be_loaded_as_a_table() -> None:
    assert LivePpdTable(TABLE, clock=Clock()).to_dict() == to_measured(TABLE)
    assert LivePpdTable(None, clock=Clock()).to_dict() == {}

"""Instances die, come back and change their roles under traffic: no request is lost, and nobody is sent to the dead."""

from collections import Counter

import pytest

from prfaas.errors import ConfigError
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.builder import deploy
from prfaas.sim.model.faults import Outage, PlannedRoleChange, read_outages, read_role_changes
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.run import prepare, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import Twin
from prfaas.sim.workload.conversations import Conversations, Turn
from prfaas.types import InstanceId
from tools.reference_tables import ROOT

PREFILLS, DECODES, REMOTE = InstanceId("h20-000"), InstanceId("h20-005"), InstanceId("h200-000")

PPD_TABLE = ROOT / "tests/data/ppd-table-2P2D.json"


class Watched:
    """A run of the case study at 2 requests per second, and when who was chosen."""

    def __init__(self, outages: str = "", role_changes: str = "", *, requests: int = 300, shared: bool = False) -> None:
        setup = prepare(Scenario())
        scenario = Scenario(outages=outages, role_changes=role_changes, shared=shared)
        self.chosen: list[tuple[float, Decision]] = []
        self.twin: Twin = deploy(setup.deployment, setup.workload, setup.plan, scenario, watch=self._watch)
        self.twin.run(traffic(Scenario(requests=requests), setup, 2.0))

    def _watch(self, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        self.chosen.append((self.twin.timeline.now, decision))

    def uses(self, name: InstanceId, start: float, end: float) -> int:
        return sum(
            name in (decision.prefill, decision.decode) for moment, decision in self.chosen if start < moment <= end
        )


def all_answered(requests: list[SimulatedRequest]) -> bool:
    counts = Counter(request.index for request in requests)
    return max(counts.values()) == 1 and all(
        request.decode_end > request.first_token > request.arrival for request in requests
    )


@pytest.mark.parametrize("name", [PREFILLS, DECODES, REMOTE])
def test_requests_of_a_dead_instance_are_sent_again(name: InstanceId) -> None:
    run = Watched(f"{name}@30s+60s")
    assert len(run.twin.requests) == 300
    assert all_answered(run.twin.requests)
    assert any(request.num_retries for request in run.twin.requests)
    assert all(request.prefill_end >= 30.0 for request in run.twin.requests if request.num_retries)


def test_dead_instance_gets_no_requests_until_it_returns() -> None:
    run = Watched(f"{DECODES}@30s+60s")
    assert run.uses(DECODES, 30.0, 35.0) > 0
    assert run.uses(DECODES, 35.0, 90.0) == 0
    assert run.uses(DECODES, 90.0, 1e9) > 0


def test_requests_of_a_dead_shared_instance_are_sent_again() -> None:
    run = Watched(f"{PREFILLS}@30s+60s", requests=150, shared=True)
    assert all_answered(run.twin.requests)
    assert any(request.num_retries for request in run.twin.requests)


def test_death_of_an_instance_clears_its_cache() -> None:
    setup = prepare(Scenario())
    conversations = Conversations([[Turn(4096, 64), Turn(256, 64)]], block_tokens=512, think_seconds=100.0)
    dead = ",".join(f"h20-{index:03d}@60s+10s" for index in range(8))

    def later_reason(outages: str) -> str:
        scenario = Scenario(local_policy="ppd", ppd_table=PPD_TABLE, outages=outages)
        follow_up = conversations.following
        twin = deploy(setup.deployment, setup.workload, setup.plan, scenario, follow_up=follow_up)
        twin.run([conversations.first(0, 0.0)])
        return twin.requests[1].reason

    assert later_reason("") == "ppd_table_local"
    assert later_reason(dead) == "ppd_first_turn"


def test_an_instance_takes_its_new_role_after_its_last_request() -> None:
    run = Watched(role_changes=f"{PREFILLS}@30s=decode+20s")
    assert all_answered(run.twin.requests)
    assert run.uses(PREFILLS, 30.0, 50.0) == 0
    later = [
        decision for moment, decision in run.chosen if moment > 50.0 and PREFILLS in (decision.prefill, decision.decode)
    ]
    assert later
    assert all(decision.decode == PREFILLS for decision in later)


@pytest.mark.parametrize("dies_at", [29.0, 35.0, 55.0])
def test_death_during_a_role_change_delays_the_instance_until_both_end(dies_at: float) -> None:
    run = Watched(f"{PREFILLS}@{dies_at}s+20s", f"{PREFILLS}@30s=decode+30s")
    assert all_answered(run.twin.requests)
    both_over = max(60.0, dies_at + 20.0)
    assert run.uses(PREFILLS, max(30.0, dies_at + 5.0), both_over) == 0
    later = [
        decision
        for moment, decision in run.chosen
        if moment > both_over and PREFILLS in (decision.prefill, decision.decode)
    ]
    assert later and all(decision.decode == PREFILLS for decision in later)


def test_outages_and_role_changes_are_parsed() -> None:
    assert read_outages("pd-003@2m+30s, prfaas-000@5+1m") == [
        Outage(InstanceId("pd-003"), 120.0, 30.0, None),
        Outage(InstanceId("prfaas-000"), 5.0, 60.0, None),
    ]
    assert read_role_changes("pd-003@2m=decode+30s") == [PlannedRoleChange(InstanceId("pd-003"), 120.0, 30.0, "decode")]


@pytest.mark.parametrize("text", ["pd-003@2m", "pd-003@soon+1s"])
def test_malformed_outage_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="outages: write"):
        read_outages(text)


@pytest.mark.parametrize("text", ["pd-003@2m+1s", "pd-003@2m=both+1s"])
def test_malformed_role_change_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="role_changes: write"):
        read_role_changes(text)

"""Policies of managers in the twin: static x, endpoint picker, refreshed PPD table, role changes, copies of prefixes."""

from collections import Counter
from dataclasses import replace

import pytest

from prfaas.model.planning.planner import best_plan
from prfaas.scheduler.ppd import PpdTable
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.builder import deploy
from prfaas.sim.model.prefix_cache import block_name
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.run import prepare, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import Twin
from prfaas.sim.workload.conversations import Conversations, Turn
from tests.support.planner_inputs import case_study
from tools.reference_tables import ROOT

APART = Scenario(fidelity="instances", requests=600)
TURNS = [Turn(512, 128), Turn(512, 128), Turn(512, 128)]


def conversing(scenario: Scenario, seen: list[tuple[Snapshot, Decision]]) -> Twin:
    """Return a twin that has held conversations of three turns, with its decisions."""
    setup = prepare(scenario)
    conversations = Conversations([TURNS], block_tokens=scenario.block_tokens)

    def watch(snapshot: Snapshot, _: RequestFacts, decision: Decision) -> None:
        seen.append((snapshot, decision))

    arguments = (setup.deployment, setup.workload, setup.plan, scenario)
    twin = deploy(*arguments, rate=4.0, follow_up=conversations.following, watch=watch)
    twin.run([conversations.first(index, index * 0.5) for index in range(300)])
    return twin


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_static_policy_prefills_its_share_of_later_turns_on_decode_instances(share: float) -> None:
    seen: list[tuple[Snapshot, Decision]] = []
    conversing(replace(APART, local_policy="static", local_turns_ratio=share), seen)
    reasons = Counter(decision.reason for _, decision in seen)
    assert reasons["static_local"] / (reasons["static_local"] + reasons["static_pd"]) == pytest.approx(share, abs=0.1)


def test_endpoint_picker_sees_what_engines_report() -> None:
    seen: list[tuple[Snapshot, Decision]] = []
    conversing(replace(APART, local_policy="endpoint_picker"), seen)
    instances = [instance for snapshot, _ in seen for instance in snapshot.instances]
    for field in ("num_running", "num_in_flight", "num_in_flight_tokens", "last_cold_use"):
        assert any(getattr(instance, field) for instance in instances), field
    assert all(decision.decode is not None for _, decision in seen)


def test_ppd_table_follows_the_turns_served() -> None:
    seen: list[tuple[Snapshot, Decision]] = []
    file = ROOT / "tests/data/ppd-table-2P2D.json"
    conversing(replace(APART, local_policy="ppd", ppd_table=file), seen)
    first, last = (seen[index][0].ppd_table for index in (0, -1))
    assert isinstance(first, PpdTable) and isinstance(last, PpdTable)
    assert first.entries != last.entries and len(first.entries) == len(last.entries)


def test_roles_move_to_the_best_split_under_load() -> None:
    scenario = replace(APART, variant="homogeneous-pd", prefill_instances=7, role_policy=True)
    setup = prepare(scenario)
    best = best_plan(setup.deployment, setup.workload).num_prefill
    seen: list[Snapshot] = []
    twin = deploy(
        setup.deployment, setup.workload, setup.plan, scenario, watch=lambda snapshot, *_: seen.append(snapshot)
    )
    twin.run(traffic(replace(scenario, requests=3_000), setup, 2.0))
    first, last = (sum(instance.role == "prefill" for instance in seen[index].instances) for index in (0, -1))
    assert (first, last) == (7, best)
    assert all(request.decode_end > 0 for request in twin.requests)


@pytest.mark.parametrize("rate", [0.0, 12.5e9])
def test_hot_prefix_is_copied_to_further_nodes(rate: float) -> None:
    deployment, workload = case_study()
    scenario = replace(APART, rebalance=rate, local_policy="decode")
    blocks = [block_name(number) for number in range(16)]
    requests = [
        SimulatedRequest(i, i / 20, num_prompt_tokens=17 * 512, num_output_tokens=8, blocks=blocks) for i in range(600)
    ]
    holders: set[int] = set()

    def watch(_: Snapshot, facts: RequestFacts, __: Decision) -> None:
        holders.add(sum(tokens == 16 * 512 for tokens in facts.cached_tokens.values()))

    twin = deploy(deployment, workload, best_plan(deployment, workload), scenario, watch=watch)
    twin.run(requests)
    assert (twin.copies is not None and twin.copies.num_copies > 0) == bool(rate)
    assert max(holders) == (8 if rate else 5), "five instances decode, and a prefix has at most eight holders"

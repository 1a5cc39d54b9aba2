"""Links between clusters lose packets, are shared with others, and go down: the deployment notices, and no request is lost."""

import math
from collections import Counter

import pytest

from prfaas.errors import ConfigError
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.builder import deploy
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.faults import EgressChange, read_egress_changes
from prfaas.sim.model.network import Egress
from prfaas.sim.model.path_monitor import EgressMonitor
from prfaas.sim.run import prepare, simulate, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import Twin
from prfaas.types import ClusterName

REMOTE, HOME = ClusterName("h200"), ClusterName("h20")


class Watched:
    """The case study at 2 requests per second, its KV leaving at its end, and when what was decided."""

    def __init__(self, changes: str, *, congestion: bool = False, requests: int = 300) -> None:
        setup = prepare(Scenario())
        scenario = Scenario(link_changes=changes, heartbeats=2.0, congestion=congestion)
        self.decided: list[tuple[float, Snapshot, Decision]] = []
        self.twin: Twin = deploy(setup.deployment, setup.workload, setup.plan, scenario, watch=self._watch)
        self.twin.run(traffic(Scenario(requests=requests), setup, 2.0))

    def _watch(self, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        self.decided.append((self.twin.timeline.now, snapshot, decision))

    def reasons(self, start: float, end: float) -> Counter[str]:
        return Counter(decision.reason for moment, _, decision in self.decided if start <= moment < end)

    @property
    def mean_ttft(self) -> float:
        return math.fsum(request.ttft for request in self.twin.requests) / len(self.twin.requests)


def test_no_request_is_offloaded_while_links_are_known_to_be_down() -> None:
    run = Watched("h200@30s=0%+40s")
    while_down = [snapshot for moment, snapshot, _ in run.decided if 32.0 <= moment < 70.0]
    assert while_down
    assert all(snapshot.links_down == {(REMOTE, HOME)} for snapshot in while_down)
    assert run.reasons(32.0, 70.0)["long"] == 0
    assert run.reasons(70.0, 1e9)["long"] > 0


def test_transfers_on_a_link_that_goes_down_are_prefilled_locally() -> None:
    run = Watched("h200@30s=0%+40s")
    again = [request for request in run.twin.requests if request.num_retries]
    assert again
    assert {decision.reason for decision in again} == {"pd"}
    assert len(run.twin.requests) == 300
    assert all(request.decode_end > request.first_token > request.arrival for request in run.twin.requests)


def test_short_link_failure_only_delays() -> None:
    run = Watched("h200@30s=0%+1.5s")
    assert not any(request.num_retries for request in run.twin.requests)
    assert not any(snapshot.links_down for _, snapshot, _ in run.decided)
    assert run.mean_ttft > Watched("").mean_ttft


def test_congestion_raises_the_threshold_and_lowers_it_again() -> None:
    run = Watched("h200@20s=3%+60s", congestion=True, requests=600)
    raised = [(moment, snapshot.paths[0].threshold_tokens) for moment, snapshot, _ in run.decided if snapshot.paths]
    assert raised
    assert min(moment for moment, _ in raised) > 20.0
    assert max(tokens for _, tokens in raised) > prepare(Scenario()).plan.threshold_tokens  # type: ignore[operator]
    assert not run.decided[-1][1].paths


def test_following_congestion_offloads_less_over_narrow_egress() -> None:
    narrow = "h200@20s=3%+60s"
    followed, stayed = (Watched(narrow, congestion=follows).reasons(30.0, 80.0)["long"] for follows in (True, False))
    assert followed < stayed


def test_calm_egress_never_moves_the_threshold() -> None:
    assert Watched("", congestion=True).mean_ttft == Watched("").mean_ttft


def test_queued_bytes_raise_the_threshold_until_they_have_left() -> None:
    timeline, raised = Timeline(), list[object]()
    egress = Egress(timeline, 100.0)
    monitor = EgressMonitor(timeline, {REMOTE: egress}, [HOME], threshold_tokens=1000)
    monitor.start()
    timeline.at(5.0, lambda _: egress.send(10_000.0, lambda _: None, None), None)
    timeline.at(30.0, lambda _: raised.extend(monitor.fields["paths"]), None)
    timeline.at(300.0, lambda _: None, None)
    timeline.run()
    assert raised
    assert monitor.fields["paths"] == ()


def test_egress_change_delays_current_flows() -> None:
    timeline, arrived = Timeline(), list[float]()
    egress = Egress(timeline, 100.0)
    egress.send(1000.0, lambda _: arrived.append(timeline.now), None)
    timeline.at(4.0, egress.begin_change, 0.0)
    timeline.at(6.0, egress.begin_change, 0.5)
    timeline.at(6.0, egress.end_change, 0.0)
    timeline.run()
    assert arrived == [pytest.approx(4.0 + 2.0 + 600.0 / 50.0)]
    assert egress.busy.total == pytest.approx(16.0)


def test_link_changes_are_parsed() -> None:
    assert read_egress_changes("h200@5m=30%+2m, h200@9m=0%+30s") == [
        EgressChange(REMOTE, 300.0, 120.0, 0.3),
        EgressChange(REMOTE, 540.0, 30.0, 0.0),
    ]


@pytest.mark.parametrize("text", ["h200@5m", "h200@5m=30+2m", "h200@5m=130%+2m"])
def test_malformed_link_change_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="link_changes: write"):
        read_egress_changes(text)


def test_link_change_of_a_cluster_without_egress_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cluster with egress h20; there are h200"):
        simulate(Scenario(fidelity="instances", link_changes="h20@5s=0%+5s"))

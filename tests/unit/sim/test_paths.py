"""Links between clusters lose packets, are shared with others, and go down: the deployment notices, and no request is lost."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sized

import pytest

from prfaas.errors import ConfigError
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.builder import InstanceSettings, deploy
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.faults import (
    CrossTraffic,
    EgressChange,
    PlannedEvents,
    draw_bursts,
    read_cross_traffic,
    read_egress_changes,
)
from prfaas.sim.model.network import Egress, LossyPath
from prfaas.sim.model.path_monitor import EgressMonitor
from prfaas.sim.replay_log import Recorder, replay
from prfaas.sim.run import prepare, simulate, traffic
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import Twin
from prfaas.types import ClusterName

REMOTE, HOME = ClusterName("h200"), ClusterName("h20")
MBIT = 1e6 / 8


class Watched:
    """The case study at 2 requests per second, its KV leaving at its end, and when what was decided."""

    def __init__(self, changes: list[EgressChange], *, congestion: bool = False, requests: int = 300) -> None:
        setup = prepare(Scenario())
        operations = PlannedEvents(egress_changes=changes, notice_seconds=2.0)
        settings = InstanceSettings(events=operations, follows_congestion=congestion)
        self.decided: list[tuple[float, Snapshot, Decision]] = []
        self.twin: Twin = deploy(setup.deployment, setup.workload, setup.plan, settings, watch=self._watch)
        self.twin.run(traffic(Scenario(requests=requests), setup, 2.0))

    def _watch(self, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        self.decided.append((self.twin.timeline.now, snapshot, decision))

    def reasons(self, start: float, end: float) -> Counter[str]:
        return Counter(decision.reason for moment, _, decision in self.decided if start <= moment < end)

    @property
    def mean_ttft(self) -> float:
        return math.fsum(request.ttft for request in self.twin.requests) / len(self.twin.requests)


def test_no_request_is_offloaded_while_links_are_known_to_be_down() -> None:
    run = Watched([EgressChange(REMOTE, 30.0, 0.0, 40.0)])
    while_down = [snapshot for moment, snapshot, _ in run.decided if 32.0 <= moment < 70.0]
    assert while_down
    assert all(snapshot.links_down == {(REMOTE, HOME)} for snapshot in while_down)
    assert run.reasons(32.0, 70.0)["long"] == 0
    assert run.reasons(70.0, 1e9)["long"] > 0


def test_transfers_on_a_link_that_goes_down_are_prefilled_locally() -> None:
    run = Watched([EgressChange(REMOTE, 30.0, 0.0, 40.0)])
    again = [request for request in run.twin.requests if request.num_retries]
    assert again
    assert {decision.reason for decision in again} == {"pd"}
    assert len(run.twin.requests) == 300
    assert all(request.decode_end > request.first_token > request.arrival for request in run.twin.requests)


def test_short_link_failure_only_delays() -> None:
    run = Watched([EgressChange(REMOTE, 30.0, 0.0, 1.5)])
    assert not any(request.num_retries for request in run.twin.requests)
    assert not any(snapshot.links_down for _, snapshot, _ in run.decided)
    assert run.mean_ttft > Watched([]).mean_ttft


def test_bytes_of_abandoned_flows_are_counted_as_dropped() -> None:
    egress = Watched([EgressChange(REMOTE, 30.0, 0.0, 40.0)]).twin.egress[REMOTE]
    handed_over = math.fsum(link.bytes_in for link in egress.links)
    assert egress.bytes_out + egress.bytes_dropped == pytest.approx(handed_over, rel=1e-9)
    assert egress.sent.total == pytest.approx(egress.bytes_out, rel=1e-9)


def test_congestion_raises_the_threshold_and_lowers_it_again() -> None:
    run = Watched([EgressChange(REMOTE, 20.0, 0.03, 60.0)], congestion=True, requests=600)
    raised = [(moment, snapshot.paths[0].threshold_tokens) for moment, snapshot, _ in run.decided if snapshot.paths]
    assert raised
    assert min(moment for moment, _ in raised) > 20.0
    assert max(tokens for _, tokens in raised) > prepare(Scenario()).plan.threshold_tokens  # type: ignore[operator]
    assert not run.decided[-1][1].paths
    assert run.twin.path_monitor.max_multiplier > 1.0


def test_following_congestion_offloads_less_over_narrow_egress() -> None:
    narrow = [EgressChange(REMOTE, 20.0, 0.03, 60.0)]
    followed, stayed = (Watched(narrow, congestion=follows).reasons(30.0, 80.0)["long"] for follows in (True, False))
    assert followed < stayed


def test_calm_egress_never_moves_the_threshold() -> None:
    assert Watched([], congestion=True).mean_ttft == Watched([]).mean_ttft


def test_decisions_over_changing_links_are_repeated_from_their_records() -> None:
    lines = io.StringIO()
    scenario = Scenario(
        fidelity="instances",
        requests=300,
        link_changes="h200@20s=3%+30s, h200@80s=0%+20s",
        congestion=True,
        heartbeats=2.0,
    )
    simulate(scenario, watch=Recorder(lines))
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert any(record["snapshot"]["paths"] for record in records)
    assert any(record["snapshot"]["links_down"] for record in records)
    assert list(replay(records)) == []


def link_watch(timeline: Timeline, under_way: Sized) -> tuple[EgressMonitor, Callable[[float], None]]:
    """Over an egress of 100 bytes per second, and what sends over it."""
    egress = Egress(timeline, 100.0)
    link = egress.link(math.inf)
    watch = EgressMonitor(timeline, {REMOTE: egress}, [HOME], active=under_way, threshold_tokens=1000)
    return watch, lambda num_bytes: egress.send(link, num_bytes, lambda _: None, None)


def test_late_transfer_is_sampled() -> None:
    timeline, under_way = Timeline(), {"a prompt"}
    watch, send = link_watch(timeline, under_way)
    watch.wake()
    timeline.at(5.0, send, 10_000.0)
    timeline.at(60.0, lambda _: under_way.clear(), None)
    timeline.run()
    assert watch.max_multiplier > 1.0
    assert watch.fields["paths"] == ()


def test_first_second_after_a_pause_counts_a_tenth() -> None:
    timeline = Timeline()
    watch, send = link_watch(timeline, ())
    for start in (100.0, 200.0):
        timeline.at(start, lambda _: watch.wake(), None)
        timeline.at(start, send, 95.0)
    timeline.run()
    assert watch.fields["paths"] == ()
    assert watch.max_multiplier == 1.0


def test_egress_change_delays_current_flows() -> None:
    timeline, arrived = Timeline(), list[float]()
    egress = Egress(timeline, 100.0)
    link = egress.link(math.inf)
    egress.send(link, 1000.0, lambda _: arrived.append(timeline.now), None)
    timeline.at(4.0, egress.begin_change, 0.0)
    timeline.at(6.0, egress.begin_change, 0.5)
    timeline.at(6.0, egress.end_change, 0.0)
    timeline.run()
    assert arrived == [pytest.approx(4.0 + 2.0 + 600.0 / 50.0)]
    assert egress.busy.total == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("rtt_ms", "loss", "connections", "mbit", "measured"),
    [
        (30, 1e-4, 1, 5000, 75),
        (30, 1e-4, 16, 5000, 1680),
        (80, 1e-3, 1, 2000, 10),
        (80, 1e-3, 32, 2000, 384),
        (40, 5e-4, 1, 650, 19.5),
    ],
)
def test_cubic_rate_on_a_lossy_path_is_close_to_measurements(
    rtt_ms: int, loss: float, connections: int, mbit: float, measured: float
) -> None:
    path = LossyPath(rtt_ms / 1000, loss, connections, "cubic")
    assert path.payload_rate(mbit * MBIT) / MBIT == pytest.approx(measured, rel=0.4)


def test_bbr_loses_only_the_lost_packets() -> None:
    assert LossyPath(0.08, 0.01, 1, "bbr").payload_rate(1e9) == pytest.approx(0.99e9)
    assert LossyPath(0.08, 0.0, 1, "cubic").payload_rate(1e9) == 1e9


@pytest.mark.parametrize("fidelity", ["stations", "instances"])
def test_loss_makes_first_tokens_later_in_both_fidelities(fidelity: str) -> None:
    def mean(loss: float) -> float:
        scenario = Scenario(
            fidelity=fidelity, requests=300, rtt=0.08, link_loss=loss, congestion_control="cubic", connections=16
        )
        return simulate(scenario).summary.ttft.mean

    assert mean(1e-4) > mean(0.0)


def test_cross_traffic_takes_its_share_and_repeats_with_its_seed() -> None:
    others = CrossTraffic(on=5.0, off=15.0, share=0.6)
    found = draw_bursts(others, [REMOTE], end=40_000.0, seed=3)
    assert math.fsum(burst.seconds for burst in found) / 40_000.0 == pytest.approx(0.25, rel=0.1)
    assert all(burst.share == pytest.approx(0.4) for burst in found)
    assert draw_bursts(others, [REMOTE], end=40_000.0, seed=3) == found
    assert draw_bursts(others, [REMOTE], end=40_000.0, seed=4) != found


def test_cross_traffic_raises_ttft() -> None:
    def mean(others: str) -> float:
        scenario = Scenario(fidelity="instances", requests=400, cross_traffic=others)
        return simulate(scenario).summary.ttft.mean

    assert mean("on=20s,off=20s,share=97%") > mean("")


def test_link_changes_and_cross_traffic_are_parsed() -> None:
    assert read_egress_changes("h200@5m=30%+2m, h200@9m=0%+30s") == [
        EgressChange(REMOTE, 300.0, 0.3, 120.0),
        EgressChange(REMOTE, 540.0, 0.0, 30.0),
    ]
    assert read_cross_traffic("on=2s,share=70%") == CrossTraffic(on=2.0, off=20.0, share=0.7)
    assert read_cross_traffic(" ") is None


@pytest.mark.parametrize("text", ["h200", "h200@5m", "h200@5m=30+2m", "h200@5m=130%+2m", "h200@5m=-3%+2m"])
def test_malformed_link_change_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="link_changes: write"):
        read_egress_changes(text)


def test_link_change_of_a_cluster_without_egress_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cluster with egress h20; there are h200"):
        simulate(Scenario(fidelity="instances", link_changes="h20@5s=0%+5s"))

"""Nodes and engines that do not answer get no new requests until they do."""

import pytest

from prfaas.index.membership import Node, NodeState
from prfaas.manager.state.instances import Instances
from prfaas.manager.state.running_clock import RunningClock
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName, ClusterName
from tests.support.timed_world import MODEL, TimedWorld

WEST, EAST = ClusterName("west"), ClusterName("east")


class Watch(TimedWorld):
    """Two decode nodes and two prefill nodes whose agents send heartbeats."""

    def __init__(self) -> None:
        super().__init__(expiry_seconds=30.0)
        self.instances = Instances(self.world, clock=self.clock)
        for name in ("a", "b"):
            self.register(name, WEST)
        for name in ("p", "q"):
            self.register(name, EAST, "prfaas", role="prefill")
        self.beat("a", "b", "p", "q")

    def report_engine(self, name: str, *, is_silent: bool) -> None:
        self.report(name, loads=[pb.EngineLoad(instance=f"{name}/0", is_silent=is_silent)])
        self.world.refresh()

    def pass_time(self, seconds: float, *alive: str) -> list[str]:
        """Move the clock while these agents send heartbeats, and return the instances that get requests."""
        ends = self.now + seconds
        while self.now < ends:
            self.now += 0.5
            self.beat(*alive)
            self.world.refresh()
        return sorted(self.instances.serving(MODEL))


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_node_without_heartbeats_gets_no_new_requests_until_it_answers(watch: Watch) -> None:
    assert watch.pass_time(1.5, "b", "p", "q") == ["a/0", "b/0", "p/0", "q/0"]
    version = watch.world.version
    assert watch.pass_time(0.5, "b", "p", "q") == ["b/0", "p/0", "q/0"]
    assert watch.world.version > version, "routers learn of it at once"
    assert watch.world.resting == {"a/0"}
    assert [member.node.name for member in watch.world.live()] == ["a", "b", "p", "q"], "it has not expired"
    assert watch.pass_time(0.5, "a", "b", "p", "q") == ["a/0", "b/0", "p/0", "q/0"]


def test_a_silent_engine_gets_no_new_requests_until_it_answers(watch: Watch) -> None:
    watch.report_engine("p", is_silent=True)
    assert sorted(watch.instances.serving(MODEL)) == ["a/0", "b/0", "q/0"]
    watch.report_engine("p", is_silent=False)
    assert sorted(watch.instances.serving(MODEL)) == ["a/0", "b/0", "p/0", "q/0"]


def test_silent_decode_nodes_are_used_only_while_no_other_decodes(watch: Watch) -> None:
    assert watch.pass_time(2.0, "q") == ["a/0", "b/0", "q/0"], "the silent prefill node is not used"


def test_a_node_that_never_sent_heartbeats_is_not_silent_before_it_expires(watch: Watch) -> None:
    watch.register("c", WEST)
    assert "c/0" in watch.pass_time(29.0, "a", "b", "p", "q")
    assert "c/0" not in watch.pass_time(1.0, "a", "b", "p", "q")


def test_other_managers_learn_who_is_silent_and_do_not_judge_by_the_age_of_figures(watch: Watch) -> None:
    watch.pass_time(2.0, "b", "p", "q")
    second = World(expiry_seconds=30.0, silence_seconds=2.0, clock=lambda: watch.now)
    for cluster in (WEST, EAST):
        for data in watch.world.records(cluster):
            second.apply_record(data)
        second.apply_figures(cluster, watch.world.figures(cluster))
    assert second.silent == {"a/0"}
    watch.now += 20.0
    second.refresh()
    assert second.silent == {"a/0"}, "the writer, not the nodes, may be the one that is gone"
    assert second.membership.state(AgentName("b")) is NodeState.LIVE


def test_time_in_which_the_manager_stood_still_is_no_silence() -> None:
    real = [100.0]
    clock = RunningClock(lambda: real[0])
    world = World(expiry_seconds=30.0, silence_seconds=2.0, clock=clock)
    world.register(Node(AgentName("a"), WEST, "pd", "a:1", 1))
    world.record_report(AgentName("a"), epoch=1, links=None, is_heartbeat=True)
    real[0] += 45.0
    world.refresh()
    assert world.membership.state(AgentName("a")) is NodeState.LIVE
    for _ in range(9):
        real[0] += 0.25
        world.refresh()
    assert world.membership.state(AgentName("a")) is NodeState.SILENT


def test_a_heartbeat_changes_nothing_but_the_time(watch: Watch) -> None:
    places, version = watch.instances.serving(MODEL), watch.world.version
    watch.now += 1.0
    watch.beat("a")
    assert watch.instances.serving(MODEL) is places and watch.world.version == version
    assert (watch.world.silent_seconds(AgentName("a")), watch.world.silent_seconds(AgentName("b"))) == (0.0, 1.0)

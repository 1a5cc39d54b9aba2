"""Instances are looked up once until a node reports or a role changes."""

import pytest

from prfaas.manager.state.instances import MAX_COLD_USES, Instances
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName, ClusterName, InstanceId
from tests.support.timed_world import TimedWorld

MODEL = "m"


class LoadedWorld(TimedWorld):
    """Two nodes of a PD cluster and one of a PrfaaS cluster."""

    def __init__(self) -> None:
        super().__init__(expiry_seconds=10.0)
        self.instances = Instances(self.world, clock=self.clock)
        self.register("a", "west")
        self.register("b", "west")
        self.register("p", "east", "prfaas", role="prefill")

    def record_report(self, name: str, *, num_running: int = 0) -> None:
        self.report(name, loads=[pb.EngineLoad(instance=f"{name}/0", num_running=num_running)])

    def states(self, cluster: str = "", in_flight: tuple[pb.InFlight, ...] = ()) -> dict[str, int]:
        """Requests under way by instance."""
        places = self.instances.serving(MODEL)
        found = self.instances.states(places, cluster=cluster, in_flight=in_flight)
        return {state.instance: state.num_requests for state in found}


@pytest.fixture
def site() -> LoadedWorld:
    return LoadedWorld()


def test_states_are_reused_until_a_node_reports(site: LoadedWorld) -> None:
    places = site.instances.serving(MODEL)
    states = site.instances.states(places)
    site.now = 1.0
    assert site.instances.serving(MODEL) is places
    for before, again in zip(states, site.instances.states(places), strict=True):
        assert before is again


def test_reported_load_counts_at_the_next_lookup(site: LoadedWorld) -> None:
    assert site.states() == {"a/0": 0, "b/0": 0, "p/0": 0}
    site.record_report("a", num_running=3)
    assert site.states() == {"a/0": 3, "b/0": 0, "p/0": 0}


def test_assignment_counts_at_once_for_its_instances_only(site: LoadedWorld) -> None:
    site.states()
    site.instances.assign(b"request", [InstanceId("b/0")], now=0.0)
    assert site.states() == {"a/0": 0, "b/0": 1, "p/0": 0}


def test_requests_in_flight_count_for_their_router_only(site: LoadedWorld) -> None:
    sent = (pb.InFlight(instance="a/0", num_requests=2, num_tokens=99),)
    places = site.instances.serving(MODEL)
    first = {state.instance: state for state in site.instances.states(places, in_flight=sent)}
    assert (first[InstanceId("a/0")].num_in_flight, first[InstanceId("a/0")].num_in_flight_tokens) == (2, 99)
    then = {state.instance: state for state in site.instances.states(places)}
    assert then[InstanceId("a/0")].num_in_flight == 0


def test_expired_node_is_left_out(site: LoadedWorld) -> None:
    site.now = 6.0
    site.record_report("a")
    assert set(site.states()) == {"a/0", "b/0", "p/0"}
    site.now = 10.0
    assert set(site.states()) == {"a/0"}
    site.now = 11.0
    site.record_report("b")
    assert set(site.states()) == {"a/0", "b/0"}


def test_draining_node_is_left_out_if_another_can_decode(site: LoadedWorld) -> None:
    site.states()
    site.world.drain(AgentName("a"))
    assert set(site.states()) == {"b/0", "p/0"}
    site.world.drain(AgentName("b"))
    assert {"a/0", "b/0"} <= set(site.states())
    site.world.undrain(AgentName("a"))
    assert set(site.states()) == {"a/0", "p/0"}


def test_instance_before_a_role_change_is_left_out(site: LoadedWorld) -> None:
    site.states()
    site.world.set_changing_role(ClusterName("west"), frozenset({InstanceId("b/0")}))
    assert set(site.states()) == {"a/0", "p/0"}


def test_ordered_role_applies_at_once(site: LoadedWorld) -> None:
    site.states()
    site.world.order_role(AgentName("b"), "prefill")
    assert site.instances.serving(MODEL)[InstanceId("b/0")].engine.role == "prefill"


def test_only_the_named_cluster_decodes(site: LoadedWorld) -> None:
    site.register("far", "north", "pd")
    assert set(site.states("west")) == {"a/0", "b/0", "p/0"}
    assert set(site.states("north")) == {"far/0", "p/0"}


def test_unserved_models_are_not_kept(site: LoadedWorld) -> None:
    for number in range(100):
        assert not site.instances.serving(f"unknown-{number}")
    assert len(site.instances._known) == 0


def test_cold_uses_are_bounded(site: LoadedWorld) -> None:
    site.instances.note_cold_use(InstanceId("a/0"), 1.0)
    for number in range(MAX_COLD_USES):
        site.instances.note_cold_use(InstanceId(f"gone-{number}"), 2.0)
    found = {state.instance: state.last_cold_use for state in site.instances.states(site.instances.serving(MODEL))}
    assert found[InstanceId("a/0")] is None

"""Role changes by the plan: stage utilization, and a change that another manager started."""

from dataclasses import replace
from pathlib import Path

from prometheus_client import REGISTRY

from prfaas.index.membership import Engine, Node
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.role_changes import ROLE_DRAIN_SECONDS, RoleChanges
from prfaas.manager.state.world import ThresholdPlan, World
from prfaas.types import AgentName, ClusterName, InstanceId

PLAN = ThresholdPlan(1, 0.0, 1000, 1.0, 0.0, "decode", {}, {}, 1.0, {}, {})
CONFIG = ManagerConfig(secret_file=Path("-"))


def _world(*nodes: str) -> World:
    world = World(expiry_seconds=1e9, clock=lambda: 0.0)
    for name in nodes:
        engine = Engine(InstanceId(f"{name}/0"), "http://e", "decode", "m")
        world.register(Node(AgentName(name), ClusterName(f"of-{name}"), "pd", f"{name}:1", 1, engines=(engine,)))
    return world


def _utilization(cluster: str) -> float | None:
    labels = {"cluster": cluster, "stage": "decode"}
    return REGISTRY.get_sample_value("prfaas_manager_stage_utilization_ratio", labels)


def test_cluster_without_nodes_has_no_utilization() -> None:
    world = _world("staying", "leaving")
    changes = RoleChanges(CONFIG, world=world, clock=lambda: 0.0)
    changes.step(PLAN, {})
    assert _utilization("of-leaving") == _utilization("of-staying") == 0.0
    world.forget(AgentName("leaving"))
    changes.step(PLAN, {})
    assert _utilization("of-leaving") is None
    assert _utilization("of-staying") == 0.0


def test_manager_that_takes_over_during_a_drain_waits_for_running_requests() -> None:
    now = 1000.0
    changes = RoleChanges(CONFIG, world=_world("n"), clock=lambda: now)
    draining = replace(PLAN, draining={InstanceId("n/0"): "prefill"})
    assert changes.step(draining, {}) is None
    now += ROLE_DRAIN_SECONDS - 1.0
    assert changes.step(draining, {}) is None
    now += 1.0
    roles = changes.step(draining, {})
    assert roles is not None and roles.assigned == {"n/0": "prefill"}
    now += 1000.0
    assert changes.step(PLAN, {}) is None
    assert changes.step(draining, {}) is None, "another manager has started the same change again"

"""How busy each stage is, and of whom that is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client import REGISTRY

from prfaas.index.membership import Engine, Node
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.role_changes import RoleChanges
from prfaas.manager.state.world import ThresholdPlan, World
from prfaas.types import AgentName, ClusterName, InstanceId

PLAN = ThresholdPlan(1, 0.0, 1000, 1.0, 0.0, "decode", {}, {}, 1.0, {}, {})


def _utilization(cluster: str) -> float | None:
    labels = {"cluster": cluster, "stage": "decode"}
    return REGISTRY.get_sample_value("prfaas_manager_stage_utilization_ratio", labels)


def test_a_cluster_that_has_left_has_no_stages_any_more() -> None:
    world = World(expiry_seconds=60.0, clock=lambda: 0.0)
    for name in ("staying", "leaving"):
        engine = Engine(InstanceId(f"{name}/0"), "http://e", "decode", "m")
        world.register(Node(AgentName(name), ClusterName(f"of-{name}"), "pd", f"{name}:1", 1, engines=(engine,)))
    changes = RoleChanges(ManagerConfig(secret_file=Path("-")), world=world, clock=lambda: 0.0)
    changes.step(PLAN, {})
    assert _utilization("of-leaving") == _utilization("of-staying") == 0.0
    world.forget(AgentName("leaving"))
    changes.step(PLAN, {})
    assert _utilization("of-leaving") is None
    assert _utilization("of-staying") == 0.0


def test_a_manager_that_takes_over_in_mid_drain_lets_what_runs_end() -> None:
    now, world = 1000.0, World(expiry_seconds=1e9, clock=lambda: 0.0)
    engine = Engine(InstanceId("n/0"), "http://e", "decode", "m")
    world.register(Node(AgentName("n"), ClusterName("c"), "pd", "n:1", 1, engines=(engine,)))
    config = ManagerConfig(secret_file=Path("-"), role_drain_seconds=60.0)
    changes = RoleChanges(config, world=world, clock=lambda: now)
    draining = replace(PLAN, draining={InstanceId("n/0"): "prefill"})
    assert changes.step(draining, {}) is None
    now += 59.0
    assert changes.step(draining, {}) is None
    now += 1.0
    roles = changes.step(draining, {})
    assert roles is not None and roles.assigned == {"n/0": "prefill"}
    now += 1000.0
    assert changes.step(PLAN, {}) is None
    assert changes.step(draining, {}) is None, "the same instance again, by another manager's word"

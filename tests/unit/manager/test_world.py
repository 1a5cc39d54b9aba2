"""State of one manager: permitted registrations, and restoration from a record."""

from dataclasses import replace

import numpy as np
import pytest

from prfaas.errors import IndexRefusal
from prfaas.index.inventory import Inventory
from prfaas.index.membership import Node
from prfaas.kv.layout import Layout
from prfaas.manager.state.world import ThresholdPlan, World, node_record, role_record
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import batch_message
from prfaas.types import AgentName, ClusterName
from tests.unit.index.test_index import EAST, HYBRID, NODE, blocks, query, state


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def node_with(layout: Layout, *, epoch: int = 1, cluster: ClusterName = EAST) -> Node:
    return Node(NODE, cluster, "pd", "n1:7400", epoch, (layout,))


def told(world: World, *, epoch: int = 1) -> None:
    inventory = Inventory()
    inventory.add_layout(HYBRID)
    batch = batch_message(1, inventory.apply([*blocks(HYBRID, range(1600)), *state(HYBRID, 800)]))
    world.register(node_with(HYBRID, epoch=epoch))
    assert world.apply_batch(NODE, epoch=epoch, batch=batch) == "applied"


def usable(world: World) -> list[int]:
    return [match.usable_tokens for match in world.index.match(query()).nodes]


def test_records_restore_blocks_without_liveness() -> None:
    clock = Clock()
    world, copy = World(expiry_seconds=30.0, clock=clock), World(expiry_seconds=30.0, clock=clock)
    told(world)
    for record in world.records(EAST):
        copy.apply_record(record)
    assert copy.live() == []
    assert usable(copy) == []
    copy.apply_figures(EAST, world.figures(EAST))
    assert usable(copy) == [800]
    assert copy.sequence(NODE, 1) == world.sequence(NODE, 1)
    assert copy.index.digests(NODE) == world.index.digests(NODE)


def test_new_epoch_starts_empty() -> None:
    world = World(expiry_seconds=30.0, clock=Clock())
    told(world)
    world.register(node_with(HYBRID, epoch=2))
    assert usable(world) == []
    assert world.sequence(NODE, 2) == 0
    with pytest.raises(IndexRefusal, match="epoch 1"):
        world.sequence(NODE, 1)


def test_node_is_in_one_cluster() -> None:
    world = World(expiry_seconds=30.0, clock=Clock())
    told(world)
    with pytest.raises(IndexRefusal, match="east"):
        world.register(node_with(HYBRID, cluster=ClusterName("west")))


def test_replaced_nodes_keep_their_liveness_without_blocks() -> None:
    clock = Clock()
    world = World(expiry_seconds=30.0, clock=clock)
    told(world)
    world.register(replace(node_with(HYBRID), name=AgentName("n2")))
    world.register(replace(node_with(HYBRID), name=AgentName("n3")))
    world.drain(AgentName("n3"))
    world.replace_nodes(ClusterName("west"), [])
    assert usable(world) == [800]
    records = [node_record(node_with(HYBRID)), node_record(replace(node_with(HYBRID), name=AgentName("n2"), epoch=2))]
    world.replace_nodes(EAST, [*records, role_record(NODE, "prefill")])
    assert usable(world) == []
    assert [member.node.name for member in world.live()] == [NODE], "n2 began a life that nobody has heard of"
    assert [record for record in world.records(EAST) if pb.Record.FromString(record).HasField("ordered_role")]
    assert [member.node.name for member in world.membership] == [NODE, "n2"]
    clock.now += 30.0
    assert world.live() == []


def test_forgotten_node_neither_drains_nor_lives() -> None:
    world = World(expiry_seconds=30.0, clock=Clock())
    told(world)
    world.drain(NODE)
    world.forget(NODE)
    with pytest.raises(IndexRefusal, match="unknown or silent"):
        world.live_node(NODE)
    told(world)
    assert world.leaving == frozenset()
    assert [record for record in world.records(EAST) if pb.Record.FromString(record).HasField("leaving")] == []


def test_node_with_different_cluster_kind_is_refused() -> None:
    clock = Clock()
    world = World(expiry_seconds=30.0, clock=clock)
    world.register(_node("n1"))
    wrong = replace(_node("n2"), cluster_kind="prfaas")
    words = "n2 says that its cluster is prfaas and n1 that it is pd: they cannot both be in cluster east"
    with pytest.raises(IndexRefusal, match=words) as refusal:
        world.register(wrong)
    assert refusal.value.reason == "mixed_kinds"
    world.register(replace(wrong, cluster=ClusterName("west")))
    # Alone in its cluster, it may change its kind.
    world.register(replace(_node("n1"), epoch=2, cluster_kind="prfaas"))


def _node(name: str) -> Node:
    return Node(AgentName(name), ClusterName(EAST), "pd", f"{name}:7400", 1)


def test_plan_with_numbers_of_numpy_is_recorded() -> None:
    plan = ThresholdPlan(
        1, 0.0, 1000, 1.0, 0.0, "decode", {"west": (1, 2)}, {}, 1.0, {}, {}, ttft_seconds=np.float64(1.5)
    )
    assert ThresholdPlan.from_json(plan.to_json()) == plan

"""Translated messages keep their content, and malformed ones are refused."""

import pytest

from prfaas.errors import IndexRefusal
from prfaas.index.inventory import Inventory
from prfaas.index.membership import Engine, EngineLoad, Figures, LinkFigures, Node
from prfaas.index.segments import Holding, Segment
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import (
    announcements_from,
    batch_message,
    digest_messages,
    digests_from,
    figures_from,
    link_message,
    load_message,
    node_from,
    node_message,
)
from prfaas.types import AgentName, ClusterName, InstanceId
from tests.unit.index.test_index import HYBRID, LONG, blocks, state

ENGINE = Engine(InstanceId("e"), "http://e:8000", "decode", "m")
NODE = Node(AgentName("n"), ClusterName("c"), "prfaas", "n:7400", 5, (HYBRID,), (ENGINE,))


def inventory() -> Inventory:
    made = Inventory()
    made.add_layout(HYBRID)
    return made


def test_node_is_translated_both_ways() -> None:
    assert node_from(pb.Node.FromString(node_message(NODE).SerializeToString())) == NODE


def test_batch_is_translated_in_order() -> None:
    source = inventory()
    told = source.apply([*blocks(HYBRID, range(1600)), *state(HYBRID, 807), *state(HYBRID, 1600)])
    blocks_holding, states_holding = Holding(HYBRID.fingerprint, 0, "memory"), Holding(HYBRID.fingerprint, 1, "memory")
    told.append(Segment(blocks_holding, LONG.at(16), LONG.at(16)[:8], 1, True, ((states_holding, 1),)))
    batch = pb.Batch.FromString(batch_message(3, told, reset=True).SerializeToString())
    assert (batch.sequence, batch.reset) == (3, True)
    assert announcements_from(batch) == told
    assert len(batch.holdings) == 2


def test_full_segment_takes_nine_bytes_per_block() -> None:
    told = inventory().apply(blocks(HYBRID, range(64 * 16 * 3)))
    assert batch_message(1, told).ByteSize() / (64 * 3) < 9.0


def test_digests_and_figures_are_translated_both_ways() -> None:
    source = inventory()
    source.apply([*blocks(HYBRID, range(1600)), *state(HYBRID, 807)])
    assert digests_from(digest_messages(source.digests())) == source.digests()
    link = LinkFigures(AgentName("p"), 1.0, 2.0, 0.3, 0.2, 5, 0.01, 8, False, "queue")
    load = EngineLoad(InstanceId("e"), 1, 2, 0.5)
    assert figures_from([link_message(link)], [load_message(load)]) == Figures((link,), (load,))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"cluster": ""},
        {"epoch": 0},
        {"cluster_kind": "cloud"},
        {"layouts": [b"\xc1"]},
        {"layouts": [b"\x01"]},
    ],
)
def test_malformed_node_is_refused(changes: dict[str, object]) -> None:
    message = node_message(NODE)
    for name, value in changes.items():
        message.ClearField(name)
        message.MergeFrom(pb.Node(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(IndexRefusal) as refusal:
        node_from(message)
    assert refusal.value.reason == "malformed"


@pytest.mark.parametrize(
    "batch",
    [
        pb.Batch(changes=[pb.Change()]),
        pb.Batch(changes=[pb.Change(segment=pb.Segment(head=LONG.at(16)))]),
        pb.Batch(holdings=[pb.Holding(tier="tape")]),
        pb.Batch(
            holdings=[pb.Holding(tier="memory")],
            changes=[pb.Change(segment=pb.Segment(head=LONG.at(16), states=[pb.States(holding=1)]))],
        ),
    ],
)
def test_malformed_batch_is_refused(batch: pb.Batch) -> None:
    with pytest.raises(IndexRefusal) as refusal:
        announcements_from(batch)
    assert refusal.value.reason == "malformed"

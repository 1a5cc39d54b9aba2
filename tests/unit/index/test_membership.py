from dataclasses import replace

import pytest

from prfaas.errors import IndexRefusal
from prfaas.index.membership import Engine, EngineLoad, Figures, Membership, Node
from prfaas.types import AgentName, ClusterName, InstanceId

NODE = Node(AgentName("n1"), ClusterName("east"), "pd", "n1:7400", epoch=3)
BUSY = Figures(engines=(EngineLoad(InstanceId("e"), 1, 2, 0.5),))


def live(membership: Membership, now: float) -> list[str]:
    return [member.node.name for member in membership.live(now)]


def test_a_node_is_live_until_the_expiry() -> None:
    membership = Membership(30.0, 2.0)
    membership.register(NODE, 100.0)
    membership.record_report(NODE.name, epoch=3, now=110.0)
    assert live(membership, 139.9) == ["n1"]
    assert live(membership, 140.0) == []
    membership.record_report(NODE.name, epoch=3, now=141.0)
    assert live(membership, 141.0) == ["n1"]


def test_a_late_report_does_not_age_a_node() -> None:
    membership = Membership(30.0, 2.0)
    membership.register(NODE, 100.0)
    membership.record_report(NODE.name, epoch=3, now=50.0)
    assert live(membership, 129.0) == ["n1"]


def test_an_older_epoch_and_an_unknown_node_are_refused() -> None:
    membership = Membership(30.0, 2.0)
    membership.register(NODE, 0.0)
    for act in (
        lambda: membership.register(replace(NODE, epoch=2), 1.0),
        lambda: membership.record_report(NODE.name, epoch=2, now=1.0),
        lambda: membership.record_report(AgentName("n2"), epoch=1, now=1.0),
    ):
        with pytest.raises(IndexRefusal, match=r"epoch|registered"):
            act()


def test_figures_last_until_newer_figures_or_a_new_epoch() -> None:
    membership = Membership(30.0, 2.0)
    membership.register(NODE, 0.0)
    membership.record_report(NODE.name, epoch=3, now=1.0, figures=BUSY)
    membership.record_report(NODE.name, epoch=3, now=2.0)
    assert membership.live(2.0)[0].figures == BUSY
    assert not membership.register(NODE, 3.0), "nothing new"
    assert membership.live(3.0)[0].figures == BUSY
    assert membership.register(replace(NODE, epoch=4), 4.0)
    assert membership.live(4.0)[0].figures == Figures()


def test_an_instance_belongs_to_one_live_node() -> None:
    engine = Engine(InstanceId("e"), "http://e", "both", "m")
    membership = Membership(30.0, 2.0)
    membership.register(replace(NODE, engines=(engine,)), 0.0)
    second = replace(NODE, name=AgentName("n2"), engines=(engine,))
    with pytest.raises(IndexRefusal, match="registered by n1"):
        membership.register(second, 1.0)
    assert membership.register(second, 31.0), "its former node is gone"

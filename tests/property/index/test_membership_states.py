"""Random events for one membership: only transitions of the table occur, and each of them is reached."""

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import IndexRefusal
from prfaas.index.membership import TRANSITIONS, Membership, Node, NodeEvent, NodeState
from prfaas.types import AgentName, ClusterName

EXPIRY_SECONDS, SILENCE_SECONDS = 30.0, 2.0
NODES = [Node(AgentName(name), ClusterName("east"), "pd", f"{name}:7400", epoch=0) for name in "ab"]
Transition = tuple[NodeState, NodeEvent, NodeState]


class Driver:
    """A membership under random calls, and the transitions that they caused."""

    def __init__(self) -> None:
        self.membership = Membership(EXPIRY_SECONDS, SILENCE_SECONDS)
        self.now = 0.0
        self.seen: set[Transition] = set()

    def step(self, event: NodeEvent, node: Node, seconds: float) -> None:
        self.now += seconds
        self._look()
        before = self.membership.state(node.name)
        with contextlib.suppress(IndexRefusal):
            if event is NodeEvent.REGISTER:
                self.membership.register(node, self.now)
            elif event is NodeEvent.REPORT:
                self.membership.record_report(node.name, epoch=0, now=self.now, is_heartbeat=True)
            elif event is NodeEvent.MISS:
                self.membership.record_report(node.name, epoch=0, now=self.now, is_silent=True)
            elif event is NodeEvent.FORGET:
                self.membership.forget(node.name)
        self._note(before, event, self.membership.state(node.name))
        self._look()

    def _look(self) -> None:
        """Let time act on the nodes, and compare the states with the result."""
        before = {node.name: self.membership.state(node.name) for node in NODES}
        live = {member.node.name for member in self.membership.live(self.now)}
        for name, state in before.items():
            after = self.membership.state(name)
            if after is not state:
                self._note(state, NodeEvent.MISS if after is NodeState.SILENT else NodeEvent.EXPIRE, after)
            assert (after in (NodeState.LIVE, NodeState.SILENT)) == (name in live)

    def _note(self, before: NodeState, event: NodeEvent, after: NodeState) -> None:
        if before is not after or (TRANSITIONS.allows(before, event) and event is not NodeEvent.EXPIRE):
            assert TRANSITIONS.next(before, event) is after
            self.seen.add((before, event, after))


steps = st.tuples(st.sampled_from(list(NodeEvent)), st.sampled_from(NODES), st.sampled_from([0.0, 3.0, 40.0]))


@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.lists(steps, max_size=40))
def test_only_transitions_of_the_table_occur(events: list[tuple[NodeEvent, Node, float]]) -> None:
    driver = Driver()
    for event, node, seconds in events:
        driver.step(event, node, seconds)


def test_every_transition_of_the_table_is_reached() -> None:
    rng, driver = random.Random(1), Driver()
    for _ in range(500):
        driver.step(rng.choice(list(NodeEvent)), rng.choice(NODES), rng.choice([0.0, 3.0, 40.0]))
    assert driver.seen == {(state, event, after) for (state, event), after in TRANSITIONS.transitions.items()}

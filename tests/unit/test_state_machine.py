"""Transition tables: allowed events, refused events, final states, and the diagram."""

from enum import Enum, auto

import pytest

from prfaas.errors import LocalProtocolError
from prfaas.state_machine import TransitionTable
from tools.reference_tables import state_diagram


class Door(Enum):
    OPEN = auto()
    CLOSED = auto()
    REMOVED = auto()


class Action(Enum):
    SHUT = auto()
    PULL = auto()
    REMOVE = auto()


TABLE = TransitionTable(
    "door",
    Door.CLOSED,
    {
        (Door.CLOSED, Action.PULL): Door.OPEN,
        (Door.OPEN, Action.SHUT): Door.CLOSED,
        (Door.CLOSED, Action.REMOVE): Door.REMOVED,
    },
)


def test_an_event_outside_the_table_is_refused_by_name() -> None:
    with pytest.raises(LocalProtocolError, match="door: REMOVE is not allowed in state OPEN"):
        TABLE.next(Door.OPEN, Action.REMOVE)


def test_the_diagram_lists_every_transition() -> None:
    diagram = state_diagram(TABLE)
    assert diagram.startswith("```mermaid\nstateDiagram-v2\n    [*] --> CLOSED\n")
    assert "    CLOSED --> OPEN: PULL\n" in diagram and diagram.endswith("REMOVED --> [*]\n```")

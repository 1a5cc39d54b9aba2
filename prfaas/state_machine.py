"""Explicit state machines: enums for states and events, and a table of every allowed transition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prfaas.errors import LocalProtocolError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class TransitionTable(Generic[S, E]):
    """Allowed transitions of one kind of object. The object itself holds its current state."""

    name: str
    initial: S
    transitions: Mapping[tuple[S, E], S]

    def next(self, state: S, event: E) -> S:
        """Return the state that follows.

        Raises:
            LocalProtocolError: the table has no transition for this event in this state.
        """
        following = self.transitions.get((state, event))
        if following is None:
            raise LocalProtocolError(f"{self.name}: {event.name} is not allowed in state {state.name}")
        return following

    def allows(self, state: S, event: E) -> bool:
        """Return whether the event is allowed in this state."""
        return (state, event) in self.transitions

    @property
    def final_states(self) -> frozenset[S]:
        """States that no event leaves."""
        return frozenset(self.transitions.values()) - {state for state, _ in self.transitions}

    def to_mermaid(self) -> str:
        """Return the table as a Mermaid state diagram, with one line for each pair of states."""
        events: dict[tuple[S, S], list[str]] = {}
        for (state, event), following in self.transitions.items():
            events.setdefault((state, following), []).append(event.name)
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.name}"]
        lines += [
            f"    {state.name} --> {following.name}: {', '.join(names)}" for (state, following), names in events.items()
        ]
        lines += [f"    {state.name} --> [*]" for state in sorted(self.final_states, key=lambda state: state.name)]
        return "\n".join(lines)

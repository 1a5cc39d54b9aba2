"""Explicit state machines: enums for states and events, and a table of every allowed transition."""

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

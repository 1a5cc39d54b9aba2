"""A request in one engine step, as any engine can describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Tables = Callable[[], Sequence[Sequence[int]]]  # a request's block ids by group


@dataclass(frozen=True)
class Scheduled:
    """Tokens computed once the step is done, and before it.

    `states`: by boundary and linear group, blocks in which the engine keeps a state that stands elsewhere than in its tables.
    """

    request_id: str
    computed_tokens: int
    tables: Tables
    before_tokens: int = 0
    states: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

"""What the scheduler side has the worker side do in one step (no engine in here)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockPairs:
    """Engine blocks of one group and the slots they belong to, one list of slots per rank."""

    position: int  # in the transfer's group list
    group: int
    first_block: int  # place of the first pair in that list
    block_ids: list[int]
    slots: list[list[int]]  # [rank][pair]; HELD where nothing is to be copied


@dataclass(frozen=True)
class SaveWork:
    """Blocks of one request that this step completes. `last`: its prefill ends with this step."""

    request_id: str
    handle: int
    pairs: list[BlockPairs]
    last: bool


@dataclass(frozen=True)
class LoadWork:
    """Blocks of one request to fill from slots; `generations` stand beside `pairs[...].slots`."""

    request_id: str
    pairs: list[BlockPairs]
    generations: list[list[list[int]]]  # [pairs][rank][pair]


@dataclass
class StepWork:
    """All of one step."""

    saves: list[SaveWork] = field(default_factory=list)
    loads: list[LoadWork] = field(default_factory=list)

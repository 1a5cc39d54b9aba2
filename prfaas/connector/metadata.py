"""Data that the scheduler side and the worker side exchange: scheduled requests, steps of copies, and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from prfaas.agent.engine.protocol import HELD
from prfaas.connector.block_map import BlockSpan
from prfaas.types import TransferOutcome

Tables = Callable[[], Sequence[Sequence[int]]]  # Block ids of a request by group.
Direction = Literal["send", "receive"]
LoadSource = Literal["receive", "reuse"]  # Another agent, or the pool of this node.
Outcome = TransferOutcome


@dataclass(frozen=True)
class ScheduledRequest:
    """Request in one engine step, with its computed tokens after and before the step.

    `states` maps boundaries and linear groups to blocks with a state that stands outside the block tables.
    """

    request_id: str
    computed_tokens: int
    tables: Tables
    before_tokens: int = 0
    states: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


PerRank = Sequence[Sequence[Sequence[int]]]  # [rank][group][block of the transfer's list]


@dataclass(frozen=True)
class Copy:
    """Part of a span that one rank copies: `slots[i]` belongs to `span.block_ids[i]`."""

    span: BlockSpan
    slots: tuple[int, ...]
    generations: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotSpan:
    """Span of blocks with the slot of each: `slots[rank][i]` belongs to `span.block_ids[i]`.

    `generations` is for loads only. A slot whose generation differs after the copy was overwritten.
    """

    span: BlockSpan
    slots: tuple[tuple[int, ...], ...]
    generations: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, span: BlockSpan, slots: PerRank, generations: PerRank = ()) -> SlotSpan:
        """Return the part of a transfer's slots and generations that belongs to a span."""
        part = slice(span.first, span.first + len(span.block_ids))
        own_slots = tuple(tuple(rank[span.group][part]) for rank in slots)
        return cls(span, own_slots, tuple(tuple(rank[span.group][part]) for rank in generations))

    def copies(self, rank: int) -> Iterator[Copy]:
        """Yield the copies of a rank, without the blocks that its agent holds already."""
        slots = self.slots[rank]
        generations = self.generations[rank] if self.generations else ()
        for is_held, run in groupby(range(len(slots)), lambda index: slots[index] == HELD):
            indices = list(run)
            part = slice(indices[0], indices[-1] + 1)
            if not is_held:
                span = BlockSpan(self.span.group, self.span.first + part.start, self.span.block_ids[part])
                yield Copy(span, slots[part], generations[part])


@dataclass(frozen=True)
class Save:
    """Final blocks of one request that a step copies out.

    Attributes:
        handle: Number of the transfer in the ring.
        last: The transfer gets no more blocks.
        release: Finished request whose engine blocks become free after the copy.
        is_sent: The blocks travel to another agent; otherwise they stay in the pool.
    """

    handle: int
    last: bool
    spans: tuple[SlotSpan, ...]
    release: str | None = None
    is_sent: bool = True


@dataclass(frozen=True)
class Load:
    """Received blocks that a request waits for."""

    request_id: str
    spans: tuple[SlotSpan, ...]


@dataclass(frozen=True)
class Step:
    """Copies of one engine step.

    Attributes:
        ends: Handles of transfers that were given up.
        epoch: Start of the agent that slots and handles belong to. A worker attached to another one copies nothing.
        failed_loads: Requests whose load was planned with an agent that is gone.
        session: Number of the scheduler's connection to the agent. No later step serves requests of an earlier one.
        number: Workers report the end of this step's saves by this number, because their blocks are pinned until then. 0 if
            nothing is pinned.
    """

    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()
    ends: tuple[int, ...] = ()
    epoch: int = 0
    failed_loads: tuple[str, ...] = ()
    session: int = 0
    number: int = 0

    def without_copies(self) -> Step:
        """Return the step for a worker that has lost its agent: loads fail, finished requests are released."""
        released = (save.release for save in self.saves if save.release is not None)
        saves = tuple(Save(0, True, (), release=request_id, is_sent=False) for request_id in released)
        failed = (*self.failed_loads, *(load.request_id for load in self.loads))
        return replace(self, saves=saves, loads=(), ends=(), failed_loads=failed)

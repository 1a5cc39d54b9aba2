"""What the scheduler side tells the workers to copy in one engine step, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.agent.protocol import HELD
from prfaas.connector.block_map import BlockSpan

PerRank = Sequence[Sequence[Sequence[int]]]  # [rank][group][block of the transfer's list]


@dataclass(frozen=True)
class Copy:
    """One rank's part of a span: `slots[i]` belongs to `span.block_ids[i]`."""

    span: BlockSpan
    slots: tuple[int, ...]
    generations: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotSpan:
    """A span of blocks and, per rank, the slot of each: `slots[rank][i]` belongs to `span.block_ids[i]`."""

    span: BlockSpan
    slots: tuple[tuple[int, ...], ...]
    generations: tuple[tuple[int, ...], ...] = ()  # of loads only: what each slot's generation must still be afterwards

    @classmethod
    def of(cls, span: BlockSpan, slots: PerRank, generations: PerRank = ()) -> SlotSpan:
        """A span's blocks beside what the agent says of those of the whole transfer."""
        part = slice(span.first, span.first + len(span.block_ids))
        own, then = (tuple(tuple(rank[span.group][part]) for rank in its) for its in (slots, generations))
        return cls(span, own, then)

    def copies(self, rank: int) -> Iterator[Copy]:
        """What `rank` has to copy: the span without the blocks that its agent holds already."""
        slots = self.slots[rank]
        generations = self.generations[rank] if self.generations else ()
        start = 0
        for end in range(len(slots) + 1):
            if end < len(slots) and slots[end] != HELD:
                continue
            if end > start:
                part = BlockSpan(self.span.group, self.span.first + start, self.span.block_ids[start:end])
                yield Copy(part, slots[start:end], generations[start:end])
            start = end + 1


@dataclass(frozen=True)
class Save:
    """Blocks of one request that this step makes final. `last`: the step computes the request's last token.

    `release` names a finished request whose engine blocks are kept until this copy has been made. What is not sent stays in
    the pool for later requests.
    """

    handle: int  # of the transfer, in the ring
    last: bool
    spans: tuple[SlotSpan, ...]
    release: str | None = None
    is_sent: bool = True


@dataclass(frozen=True)
class Load:
    """Received blocks that one request waits for."""

    request_id: str
    spans: tuple[SlotSpan, ...]


@dataclass(frozen=True)
class Step:
    """All copies of one engine step. `ends`: handles of transfers that were given up.

    `epoch` is that of the agent whose slots and handles these are; a worker attached to another one copies nothing.
    `session` numbers the scheduler's connections to it: what was asked for over an earlier one is in no later step.
    """

    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()
    ends: tuple[int, ...] = ()
    epoch: int = 0
    failed_loads: tuple[str, ...] = ()  # requests whose load was planned with an agent that has gone since
    session: int = 0

    def without_copies(self) -> Step:
        """The same step for a worker that has lost its agent: loads fail, finished requests are released."""
        released = tuple(
            Save(0, True, (), save.release, is_sent=False) for save in self.saves if save.release is not None
        )
        failed = (*self.failed_loads, *(load.request_id for load in self.loads))
        return Step(saves=released, epoch=self.epoch, failed_loads=failed, session=self.session)

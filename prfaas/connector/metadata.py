"""A request in one engine step, as any engine can describe it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.agent.engine.protocol import HELD
from prfaas.connector.block_map import BlockSpan
from prfaas.types import FailureReason

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


Direction = Literal["send", "receive"]
Source = Literal["receive", "reuse"]  # where loaded KV comes from: another agent, or blocks that this node's pool holds
Counted = Literal["send", "receive", "reuse", "store", "checkpoint"]
Outcome = (
    FailureReason
    | Literal[
        "completed",  # sent: every layer was handed to the agent; received: loaded into the engine's blocks
        "no_grant",  # the request's parameters carry no grant, or one that cannot be read
        "wrong_role",  # this engine's kv_role does not send, or does not receive
        "wrong_length",  # the prompt is not as long as the granted one
        "unhashable",  # the request has extras that no hash covers
        "rejected",  # the engine's API refused the request, or its client left before a whole answer
        "whole_prompt",  # the engine computes all of the prompt, for its log-probabilities
        "in_use",  # another request of this engine has this transfer
        "agent_slow",  # no answer within `open_wait_seconds`, or none to an earlier question either
        "agent_lost",  # the agent went away
        "timeout",  # nothing came within `receive_timeout_seconds` or, of this node's pool, `hold_wait_seconds`
        "held",  # the engine's own prefix cache covers the whole transfer
        "overwritten",  # a slot was given to another block while it was read
        "no_prefix",  # this node's pool holds nothing of the prompt that the engine's own cache does not
        "aborted",  # the request ended before its transfer
        "reset",  # the engine was told to forget what was computed before
    ]
)


@dataclass
class Counts:
    """Counts since they were last taken."""

    transfers: Counter[tuple[Counted, str]] = field(default_factory=Counter)
    copied_bytes: Counter[Direction] = field(default_factory=Counter)
    state_tail_bytes: int = 0  # states that left after the forward pass, for want of a hook at their layer's end
    ring_overflows: int = 0  # steps that found entries that the agent's ring had had no room for

    def take(self) -> Counts:
        """These counts; the tally starts at zero again."""
        taken = Counts(self.transfers.copy(), self.copied_bytes.copy(), self.state_tail_bytes, self.ring_overflows)
        self.transfers.clear()
        self.copied_bytes.clear()
        self.state_tail_bytes = self.ring_overflows = 0
        return taken

    def __bool__(self) -> bool:
        return bool(self.transfers or self.copied_bytes or self.state_tail_bytes or self.ring_overflows)


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

"""Blocks for which the agent was asked for slots of its pool, until it has answered or been waited for long enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prfaas import logs
from prfaas.agent.engine.protocol import Cancel, Message, SendOpened, Store, TransferFailed
from prfaas.connector.block_map import BlockMap, BlockSpan
from prfaas.connector.metadata import Counts, Outcome, Save, Scheduled, SlotSpan
from prfaas.hashing import HashChain
from prfaas.types import GroupBlocks, TransferId


@dataclass(eq=False, kw_only=True)
class AskedStore:
    """What one request leaves of its first `num_tokens` tokens. Answered: `opened` or `failed` is there."""

    request_id: str
    num_tokens: int
    ask_until: float  # monotonic seconds
    opened: SendOpened | None = None
    failed: Outcome | None = None


Its = TypeVar("Its", bound=AskedStore)


class AskedStores(Generic[Its]):
    """Those without an answer that was acted on. No clock: takes `now`."""

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._by_transfer: dict[TransferId, Its] = {}

    def __len__(self) -> int:
        return len(self._by_transfer)

    def ask(self, its: Its, groups: Sequence[GroupBlocks]) -> None:
        transfer_id = TransferId(os.urandom(16))
        self._by_transfer[transfer_id] = its
        self._post(Store(transfer_id, its.num_tokens, tuple(groups)))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        its = self._by_transfer.get(message.transfer_id)
        if its is None:
            return
        if isinstance(message, SendOpened):
            its.opened = message
        else:
            its.failed = message.reason

    def take_answered(self, *, now: float) -> list[Its]:
        """Those that have slots, and those that will have none, which have `failed`."""
        answered = [
            (its, name) for name, its in self._by_transfer.items() if its.opened or its.failed or now >= its.ask_until
        ]
        for its, transfer_id in answered:
            del self._by_transfer[transfer_id]
            if its.opened is None or its.failed is not None:
                its.failed = its.failed or "agent_slow"
                self._post(Cancel(transfer_id))
        return [its for its, _ in answered]

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it; the blocks are released with the next step."""
        for its in self._by_transfer.values():
            its.failed = its.failed or reason


_log = logs.get("connector.leftovers")


@dataclass(eq=False, kw_only=True)
class FinishedStore(AskedStore):
    """One finished request whose engine blocks are kept until they are copied."""

    tables: Sequence[Sequence[int]]


class FinishedStores:
    """All of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(self, block_map: BlockMap, *, post: Callable[[Message], None], tally: Counts) -> None:
        self._map = block_map
        self._tally = tally
        self._asked: AskedStores[FinishedStore] = AskedStores(post)
        self._copying: dict[str, FinishedStore] = {}

    def __len__(self) -> int:
        return len(self._asked) + len(self._copying)

    def begin(self, request_id: str, chain: HashChain, tables: Sequence[Sequence[int]], *, ask_until: float) -> None:
        """A request has computed all of `chain`; its block ids, `tables[group]`, stay its own until they are copied."""
        kept = [list(table) for table in tables]
        its = FinishedStore(request_id=request_id, num_tokens=chain.num_tokens, ask_until=ask_until, tables=kept)
        self._asked.ask(its, self._map.transfer_groups(chain, chain.num_tokens))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        self._asked.on_message(message)

    def saves(self, *, now: float) -> list[Save]:
        """What the workers copy in this step; a request that is not to be stored is only released."""
        answered = self._asked.take_answered(now=now)
        self._copying |= {its.request_id: its for its in answered}
        return [self._save(its) for its in answered]

    def _save(self, its: FinishedStore) -> Save:
        if its.opened is None or its.failed is not None:
            return Save(0, True, (), release=its.request_id, is_sent=False)
        spans = self._map.filled(its.tables, its.num_tokens, saved_tokens=0, computed_tokens=its.num_tokens)
        slots = tuple(SlotSpan.of(span, its.opened.slots) for span in spans)
        return Save(its.opened.handle, True, slots, release=its.request_id, is_sent=False)

    def released(self, request_id: str) -> None:
        """Every worker has made the copy; the engine frees the blocks."""
        its = self._copying.pop(request_id, None)
        if its is not None:
            outcome: Outcome = its.failed or "completed"
            self._tally.transfers["store", outcome] += 1
            _log.info("request.stored", request_id=request_id, outcome=outcome, num_tokens=its.num_tokens)

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it; the blocks are released with the next step."""
        self._asked.fail_all(reason)


@dataclass(frozen=True)
class BlockPins:
    """How blocks of the engine, by their ids, are kept from being given to other requests."""

    pin: Callable[[Sequence[int]], None]
    unpin: Callable[[Sequence[int]], None]


@dataclass(eq=False)
class Prompt:
    """A request's prompt; its latest checkpoint, or where its computation began."""

    chain: HashChain
    last_tokens: int | None = None


@dataclass(eq=False, kw_only=True)
class Checkpoint(AskedStore):
    """Pinned blocks of one boundary."""

    spans: tuple[BlockSpan, ...]

    @property
    def block_ids(self) -> list[int]:
        return [block_id for span in self.spans for block_id in span.block_ids]


class Checkpoints:
    """All of one engine. No clock, no socket: takes `now`, posts through `post`."""

    def __init__(
        self,
        block_map: BlockMap,
        pins: BlockPins | None,
        *,
        min_tokens: int,
        post: Callable[[Message], None],
        tally: Counts,
    ) -> None:
        """An engine without `pins` leaves none; nor is one left of fewer than `min_tokens` tokens."""
        self._map = block_map
        self._pins = pins
        self._min_tokens = min_tokens
        self._tally = tally
        self._prompts: dict[str, Prompt] = {}
        self._asked: AskedStores[Checkpoint] = AskedStores(post)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def has_work(self) -> bool:
        """Whether the next step has to look after a prompt that is computed, or a checkpoint."""
        return bool(self._prompts or self._asked)

    def begin(self, request_id: str, chain: HashChain) -> None:
        """A request's prompt is about to be computed."""
        if self._pins is not None and self._map.checkpoint_spacing_tokens:
            self._prompts[request_id] = Prompt(chain)

    def end(self, request_id: str) -> None:
        """The prompt is computed, or the request has ended; what is pinned of it is still copied."""
        self._prompts.pop(request_id, None)

    def computed(self, its: Scheduled, *, ask_until: float) -> None:
        """Ask for slots for what this step leaves at the boundaries that it reaches."""
        prompt = self._prompts.get(its.request_id)
        if prompt is None:
            return
        if its.before_tokens >= prompt.chain.num_tokens:
            self.end(its.request_id)
            return
        if prompt.last_tokens is None:
            prompt.last_tokens = its.before_tokens
        reached = self._map.boundary(its.before_tokens, its.computed_tokens)
        for boundary in sorted({*its.states, *([reached] if reached else [])}):
            if self._is_wanted(prompt, boundary):
                self._ask(its, prompt, boundary, ask_until=ask_until)

    def _is_wanted(self, prompt: Prompt, boundary: int) -> bool:
        """Whether a checkpoint is worth its bytes there; the prompt's own end is left with its other blocks."""
        assert prompt.last_tokens is not None
        is_far = boundary - prompt.last_tokens >= self._map.checkpoint_spacing_tokens
        is_inside = self._min_tokens <= boundary < prompt.chain.num_tokens
        return is_far and is_inside and boundary % self._map.step_tokens == 0

    def _ask(self, its: Scheduled, prompt: Prompt, boundary: int, *, ask_until: float) -> None:
        assert self._pins is not None
        spans = self._map.checkpoint(its.tables(), boundary, its.states.get(boundary, {}))
        if spans is None:
            return
        prompt.last_tokens = boundary
        checkpoint = Checkpoint(request_id=its.request_id, num_tokens=boundary, ask_until=ask_until, spans=spans)
        self._pins.pin(checkpoint.block_ids)
        self._asked.ask(checkpoint, self._map.checkpoint_groups(prompt.chain, boundary))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        self._asked.on_message(message)

    def saves(self, *, now: float) -> list[Save]:
        """What the workers copy in this step; its blocks are the engine's again."""
        saves = []
        for its in self._asked.take_answered(now=now):
            if its.opened is not None and its.failed is None:
                slots = tuple(SlotSpan.of(span, its.opened.slots) for span in its.spans)
                saves.append(Save(its.opened.handle, True, slots, is_sent=False))
            self._end(its)
        return saves

    def _end(self, its: Checkpoint) -> None:
        assert self._pins is not None
        self._pins.unpin(its.block_ids)
        outcome: Outcome = its.failed or "completed"
        self._tally.transfers["checkpoint", outcome] += 1
        _log.info("checkpoint.stored", request_id=its.request_id, outcome=outcome, num_tokens=its.num_tokens)

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it; the blocks are released with the next step."""
        self._asked.fail_all(reason)

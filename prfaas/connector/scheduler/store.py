"""Blocks that requests leave in the agent's pool for later requests: finished requests, and checkpoints of prompts.

asked ──SendOpened──▶ copied by the next step ──▶ gone: the engine may reuse the blocks
asked ──TransferFailed, no reply in time──▶ gone (Cancel): nothing is copied

The engine keeps the blocks of a finished request until they are copied. Blocks of a checkpoint are pinned, since their
request goes on.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas import logs
from prfaas.agent.engine.protocol import Cancel, Message, SendOpened, Store, TransferFailed
from prfaas.connector.block_map import BlockMap, BlockSpan
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Outcome, Save, ScheduledRequest, SlotSpan
from prfaas.hashing import HashChain
from prfaas.types import GroupBlocks, TransferId

_log = logs.get("connector.store")


@dataclass(frozen=True)
class BlockPins:
    """Functions that keep engine blocks, by their ids, from being given to other requests."""

    pin: Callable[[Sequence[int]], None]
    unpin: Callable[[Sequence[int]], None]


class SavedBlocks:
    """Pinned blocks of running saves, by step. Without workers that report, saves end with their step."""

    def __init__(self, pins: BlockPins, *, num_workers: int) -> None:
        self._pins = pins
        self._num_workers = num_workers
        self._numbers = itertools.count(1)
        self._by_step: dict[int, list[int]] = {}
        self._num_reports: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Return whether any blocks are pinned."""
        return bool(self._by_step)

    def add(self, saves: Sequence[Save]) -> int:
        """Pin the blocks that a step copies and return its number. A finished request keeps its blocks by itself."""
        spans = [span.span for save in saves if save.release is None for span in save.spans]
        if not spans or not self._num_workers:
            return 0
        number, block_ids = next(self._numbers), [block_id for span in spans for block_id in span.block_ids]
        self._pins.pin(block_ids)
        self._by_step[number] = block_ids
        return number

    def on_saved(self, steps: Mapping[int, int]) -> None:
        """Unpin the blocks of steps that every worker has reported."""
        self._num_reports.update(steps)
        for number in [number for number in steps if self._num_reports[number] >= self._num_workers]:
            del self._num_reports[number]
            self._pins.unpin(self._by_step.pop(number))


@dataclass(eq=False)
class StoredBlocks:
    """Blocks of one request for which slots were requested from the agent.

    `reply_deadline` is in monotonic seconds. After a reply, `opened` or `failure` is set.
    """

    kind: Literal["store", "checkpoint"]
    request_id: str
    num_tokens: int
    spans: tuple[BlockSpan, ...]
    reply_deadline: float
    opened: SendOpened | None = None
    failure: Outcome | None = None

    @property
    def is_checkpoint(self) -> bool:
        return self.kind == "checkpoint"

    @property
    def block_ids(self) -> list[int]:
        return [block_id for span in self.spans for block_id in span.block_ids]

    def save(self) -> Save:
        """Return the copies of the next step. If the agent gave no slots, only the request's blocks are released."""
        release = None if self.is_checkpoint else self.request_id
        if self.opened is None or self.failure is not None:
            return Save(0, True, (), release=release, is_sent=False)
        slots = tuple(SlotSpan.of(span, self.opened.slots) for span in self.spans)
        return Save(self.opened.handle, True, slots, release=release, is_sent=False)


@dataclass(eq=False)
class Prompt:
    """Prompt that is being computed. `last_tokens` is its latest checkpoint, or where its computation began."""

    chain: HashChain
    last_tokens: int | None = None


class PrefixStores:
    """All blocks that one engine leaves in the pool. Callers pass the time; messages go through `post`."""

    def __init__(
        self, block_map: BlockMap, pins: BlockPins, *, min_tokens: int, post: Callable[[Message], None], counts: Counts
    ) -> None:
        """Create an empty table. Prompts with fewer than `min_tokens` tokens leave no checkpoints."""
        self._map = block_map
        self._pins = pins
        self._min_tokens = min_tokens
        self._post = post
        self._counts = counts
        self._prompts: dict[str, Prompt] = {}
        self._requested: dict[TransferId, StoredBlocks] = {}
        self._copying: dict[str, StoredBlocks] = {}  # Finished requests by id.

    @property
    def has_work(self) -> bool:
        """True if the next step must handle a prompt or stored blocks."""
        return bool(self._prompts or self._requested or self._copying)

    @property
    def has_requested(self) -> bool:
        """True if an answer of the agent is awaited."""
        return bool(self._requested)

    @property
    def has_pins(self) -> bool:
        return any(blocks.is_checkpoint for blocks in self._requested.values())

    @property
    def will_free_blocks(self) -> bool:
        """True if the engine gets back blocks of finished requests within a few steps."""
        return bool(self._copying) or any(not blocks.is_checkpoint for blocks in self._requested.values())

    def begin_prompt(self, request_id: str, chain: HashChain) -> None:
        """Watch a prompt for checkpoints."""
        if self._map.checkpoint_spacing_tokens:
            self._prompts[request_id] = Prompt(chain)

    def end_prompt(self, request_id: str) -> None:
        """Stop watching a prompt. Pinned blocks are still copied."""
        self._prompts.pop(request_id, None)

    def on_scheduled(self, request: ScheduledRequest, *, reply_deadline: float) -> None:
        """Ask for slots for the checkpoints that this step reaches."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        if request.before_tokens >= prompt.chain.num_tokens:
            self.end_prompt(request.request_id)
            return
        if prompt.last_tokens is None:
            prompt.last_tokens = request.before_tokens
        reached = self._map.boundary(request.before_tokens, request.computed_tokens)
        for boundary in sorted({*request.states, *([reached] if reached else [])}):
            if self._is_wanted(prompt, boundary):
                self._add_checkpoint(request, prompt, boundary, reply_deadline=reply_deadline)

    def _is_wanted(self, prompt: Prompt, boundary: int) -> bool:
        """Return whether a checkpoint is worth its bytes. The end of the prompt is stored with the finished request."""
        assert prompt.last_tokens is not None
        is_far = boundary - prompt.last_tokens >= self._map.checkpoint_spacing_tokens
        is_inside = self._min_tokens <= boundary < prompt.chain.num_tokens
        return is_far and is_inside and boundary % self._map.step_tokens == 0

    def _add_checkpoint(
        self, request: ScheduledRequest, prompt: Prompt, boundary: int, *, reply_deadline: float
    ) -> None:
        spans = self._map.checkpoint(request.tables(), boundary, request.states.get(boundary, {}))
        if spans is None:
            return
        prompt.last_tokens = boundary
        blocks = StoredBlocks("checkpoint", request.request_id, boundary, spans, reply_deadline)
        self._pins.pin(blocks.block_ids)
        self._ask(blocks, self._map.checkpoint_groups(prompt.chain, boundary))

    def add_finished(
        self, request_id: str, chain: HashChain, tables: Sequence[Sequence[int]], *, reply_deadline: float
    ) -> None:
        """Ask for slots for a request that has computed all of `chain`. `tables[group]` are its block ids."""
        num_tokens = chain.num_tokens
        spans = self._map.filled(tables, num_tokens, saved_tokens=0, computed_tokens=num_tokens)
        blocks = StoredBlocks("store", request_id, num_tokens, spans, reply_deadline)
        self._ask(blocks, self._map.transfer_groups(chain, num_tokens))

    def _ask(self, blocks: StoredBlocks, groups: tuple[GroupBlocks, ...]) -> None:
        transfer_id = TransferId(os.urandom(16))
        self._requested[transfer_id] = blocks
        self._post(Store(transfer_id, blocks.num_tokens, groups))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        """Handle the agent's reply."""
        blocks = self._requested.get(message.transfer_id)
        if blocks is not None and isinstance(message, SendOpened):
            blocks.opened = message
        elif blocks is not None and isinstance(message, TransferFailed):
            blocks.failure = message.reason

    def saves(self, *, now: float) -> list[Save]:
        """Return the copies of this step, and unpin the blocks of its checkpoints."""
        saves = []
        for transfer_id, blocks in list(self._requested.items()):
            if not (blocks.opened or blocks.failure or now >= blocks.reply_deadline):
                continue
            del self._requested[transfer_id]
            if blocks.opened is None or blocks.failure is not None:
                blocks.failure = blocks.failure or "agent_silent"
                self._post(Cancel(transfer_id))
            if not blocks.is_checkpoint:
                self._copying[blocks.request_id] = blocks
                saves.append(blocks.save())
                continue
            if blocks.failure is None:
                saves.append(blocks.save())
            self._pins.unpin(blocks.block_ids)
            self._end(blocks)
        return saves

    def on_copied(self, request_id: str) -> None:
        """End the store of a finished request after every worker has copied it. The engine frees the blocks."""
        blocks = self._copying.pop(request_id, None)
        if blocks is not None:
            self._end(blocks)

    def _end(self, blocks: StoredBlocks) -> None:
        outcome: Outcome = blocks.failure or "completed"
        self._counts.add_transfer(blocks.kind, outcome)
        fields = {"request_id": blocks.request_id, "outcome": outcome, "num_tokens": blocks.num_tokens}
        _log.info("blocks.stored", kind=blocks.kind, **fields)

    def fail_all(self, reason: Outcome) -> None:
        """Give up all stores without slots. The next step releases their blocks."""
        for blocks in self._requested.values():
            blocks.failure = blocks.failure or reason

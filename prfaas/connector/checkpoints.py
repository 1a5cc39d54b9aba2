"""States and windows at block boundaries of prompts, left in the agent's pool while the prompts are computed.

A later prompt that leaves such a prompt in the middle begins there. Of an earlier boundary the engine's block tables hold
neither state nor window for more than a step or two, so a checkpoint's blocks are pinned until they are copied:

asked ──SendOpened──▶ copied by the next step
asked ──TransferFailed, no answer in time──▶ gone

The copy is named in the step in which the pin ends: no engine writes to a block that it gives away before its next step, and
each step ends with the model's stream waiting for the copies that still read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.protocol import Message, SendOpened, TransferFailed
from prfaas.connector.asked_stores import AskedStore, AskedStores
from prfaas.connector.block_map import BlockMap, BlockSpan
from prfaas.connector.outcomes import Outcome, Tally
from prfaas.connector.scheduled import Scheduled
from prfaas.connector.steps import Save, SlotSpan
from prfaas.hashing import HashChain

_log = logs.get("connector.checkpoints")


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
        tally: Tally,
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

"""Plan of the prefill worker's steps: prompts one by one, short ones first, cut where a step is full. No I/O, no torch.

Decode allocates the blocks of a prompt as if the prompt were already computed. Groups with a sliding window or a state then
have no blocks for tokens that decode no longer needs, but the prefill does. It uses scratch blocks in their place, which
decode's scheduler has set aside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0
SHARED_STEP_TOKENS = 128  # A larger step is hardly more efficient, and would delay its first prompt.
OVERTAKING_RATIO = 4  # Shorter prompts overtake one until four times its tokens have been computed since it came.


@dataclass(frozen=True)
class GroupShape:
    """Needs of one KV group.

    Attributes:
        block_tokens: Tokens of a block.
        window_tokens: Tokens before a chunk that it attends to; 0 for all of them.
        is_state: The group has a recurrent state: a chunk reads the block before it and writes its last block.
    """

    block_tokens: int
    window_tokens: int = 0
    is_state: bool = False

    @property
    def needs_scratch(self) -> bool:
        return self.is_state or self.window_tokens > 0

    def needed(self, start: int, end: int) -> range | tuple[int, ...]:
        """Return the entries of a block table that computing tokens `start` to `end` reads or writes."""
        last = (end - 1) // self.block_tokens
        if self.is_state:
            return (max(0, start - 1) // self.block_tokens, last)
        first = max(0, start - self.window_tokens) if self.window_tokens else 0
        return range(first // self.block_tokens, last + 1)


def num_scratch_blocks(groups: Sequence[GroupShape], chunk_tokens: int) -> int:
    """Return the scratch blocks that a chunk of `chunk_tokens` tokens needs at most."""
    states = sum(2 for group in groups if group.is_state)
    windows = [group for group in groups if group.window_tokens and not group.is_state]
    return states + sum(-(-(chunk_tokens + group.window_tokens) // group.block_tokens) + 1 for group in windows)


def has_context(groups: Sequence[GroupShape], start: int, end: int) -> bool:
    """Return whether vLLM holds the tokens before `start` that the prefill attends to.

    vLLM drops all that lies before the window of `end`, even if it was cached or loaded.
    """
    return not start or all(end < group.window_tokens for group in groups if group.window_tokens)


@dataclass(frozen=True)
class Order:
    """Tokens `start` to `end` of a request, to be computed into the blocks of `tables`, one table per KV group."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Progress:
    """An order, how far it is, and its scratch blocks by group and table entry."""

    order: Order
    computed: int
    scratch: list[dict[int, int]]
    arrived: int  # Tokens that the queue had computed when the order came.

    @property
    def rank(self) -> float:
        """Number of tokens left, and more for a late order. No order waits for ever behind shorter ones."""
        return self.order.end - self.computed + self.arrived / OVERTAKING_RATIO


@dataclass(frozen=True)
class Chunk:
    """Part of an order that one step computes. `new_blocks` are to be zeroed before the step where the model needs it."""

    order: Order
    start: int
    end: int
    tables: tuple[list[int], ...]
    new_blocks: list[int]

    @property
    def is_last(self) -> bool:
        return self.end == self.order.end


@dataclass
class PrefillQueue:
    """Orders that wait or run."""

    groups: Sequence[GroupShape]
    chunk_tokens: int
    max_rows: int
    scratch_blocks: Sequence[int]
    _orders: list[Progress] = field(default_factory=list)
    _num_computed: int = 0

    def add(self, order: Order) -> None:
        self._orders.append(Progress(order, order.start, [{} for _ in self.groups], self._num_computed))

    def cancel(self, request_id: str) -> None:
        """Forget an order."""
        self._orders = [item for item in self._orders if item.order.request_id != request_id]

    def __bool__(self) -> bool:
        return bool(self._orders)

    def next_step(self) -> list[Chunk]:
        """Return the chunks of the next step, which are then computed. Orders that share scratch blocks run one by one."""
        chunks: list[Chunk] = []
        room = self.chunk_tokens
        is_shared = not any(group.needs_scratch for group in self.groups)
        while self._orders and room > 0 and len(chunks) < (self.max_rows if is_shared else 1):
            item = self._first(is_shared=is_shared)
            end = self._end(item, room)
            chunks.append(self._chunk(item, end))
            self._num_computed += end - item.computed
            room = min(room, SHARED_STEP_TOKENS) - (end - item.computed)
            item.computed = end
            if end == item.order.end:
                self._orders.remove(item)
        return chunks

    def _first(self, *, is_shared: bool) -> Progress:
        """Return the order to compute. One that has scratch blocks is finished before another begins."""
        begun = [] if is_shared else [item for item in self._orders if item.computed > item.order.start]
        return min(begun or self._orders, key=lambda item: item.rank)

    def _end(self, item: Progress, room: int) -> int:
        """Return where the next chunk ends. vLLM's CPU kernels write a state at the end of a chunk only."""
        end = min(item.order.end, item.computed + room)
        for group in self.groups:
            boundary = end // group.block_tokens * group.block_tokens
            if group.is_state and boundary > item.computed:
                end = boundary
        return end

    def _chunk(self, item: Progress, end: int) -> Chunk:
        start, is_first = item.computed, item.computed == item.order.start
        needed = [group.needed(start, end) if group.needs_scratch else () for group in self.groups]
        for scratch, entries in zip(item.scratch, needed, strict=True):
            for entry in scratch.keys() - set(entries):
                del scratch[entry]
        used = {block for scratch in item.scratch for block in scratch.values()}
        free = [block for block in self.scratch_blocks if block not in used]
        tables, new_blocks = [], []
        for group, given, scratch, entries in zip(self.groups, item.order.tables, item.scratch, needed, strict=True):
            table = list(given)
            for entry in entries:
                if table[entry] != NULL_BLOCK:
                    continue
                if entry not in scratch:
                    scratch[entry] = free.pop()
                    new_blocks.append(scratch[entry])
                table[entry] = scratch[entry]
            if is_first and not group.is_state:
                held = item.order.start // group.block_tokens
                new_blocks += [block for block in given[held:] if block != NULL_BLOCK]
            tables.append(table)
        return Chunk(item.order, start, end, tuple(tables), new_blocks)

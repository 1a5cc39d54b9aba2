"""Sliding window: each token attends to the last `window_tokens` tokens, itself included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.kv.kinds.kind import KVKind

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup


class SlidingWindow(KVKind):
    """Blocks of the window before the point of resumption; earlier blocks may be missing."""

    name = "sliding_window"
    has_window = True

    def first_token(self, group: KVGroup, num_tokens: int) -> int:
        return max(0, num_tokens - (group.window_tokens or 1) + 1)

    def servable_ends(self, group: KVGroup, blocks: int, num_blocks: int) -> int:
        needed = self.num_checkpoint_blocks(group)
        held = (blocks << needed) | ((1 << needed) - 1)  # Blocks before the prompt count as held.
        done = 1
        while done < needed:
            step = min(done, needed - done)
            held &= held >> step
            done += step
        return (held if needed else -1) & (2 << num_blocks) - 1

    def num_checkpoint_blocks(self, group: KVGroup) -> int:
        return -(-((group.window_tokens or 1) - 1) // group.block_tokens)

"""Chunked local attention: each token attends to the tokens of its own chunk, up to itself."""

from typing import TYPE_CHECKING

from prfaas.kv.kinds.sliding_window import SlidingWindow

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup


class ChunkedLocal(SlidingWindow):
    """Blocks of the chunk in which decoding resumes; `window_tokens` is a chunk's length."""

    name = "chunked_local"

    def first_token(self, group: "KVGroup", num_tokens: int) -> int:
        return num_tokens - num_tokens % (group.window_tokens or 1)

    def servable_ends(self, group: "KVGroup", blocks: int, num_blocks: int) -> int:
        size, chunk = group.block_tokens, group.window_tokens or 1
        found = 0
        for start in range(0, num_blocks * size + 1, chunk):
            rest = blocks >> start // size
            gap = start // size + (rest ^ (rest + 1)).bit_length() - 1  # The first block of the chunk that is not held.
            last = min(gap, num_blocks, (start + chunk - 1) // size)
            found |= (1 << last + 1) - 1 & ~((1 << -(-start // size)) - 1)
        return found

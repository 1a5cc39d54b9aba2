"""Chunked local attention: each token attends to the tokens of its own chunk, up to itself."""

from typing import TYPE_CHECKING

from prfaas.kv.kinds.kind import KVKind

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup


class ChunkedLocal(KVKind):
    """Blocks of the chunk in which decoding resumes; `window_tokens` is a chunk's length."""

    name = "chunked_local"
    has_window = True

    def first_token(self, group: "KVGroup", num_tokens: int) -> int:
        return num_tokens - num_tokens % (group.window_tokens or 1)

    def servable_ends(self, group: "KVGroup", blocks: int, num_blocks: int) -> int:
        size, chunk = group.block_tokens, group.window_tokens or 1
        found = 0
        for start in range(0, num_blocks * size + 1, chunk):
            first, rest = start // size, blocks >> start // size
            held = (
                first + (rest ^ (rest + 1)).bit_length() - 1
            )  # Blocks are held without a gap from `first` up to there.
            last = min(held, num_blocks, (start + chunk - 1) // size)
            found |= (1 << last + 1) - 1 & ~((1 << -(-start // size)) - 1)
        return found

    def num_checkpoint_blocks(self, group: "KVGroup") -> int:
        return -(-((group.window_tokens or 1) - 1) // group.block_tokens)

"""What a node's prefix cache holds: the node's own pool, whose slots nobody writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.cachepool.eviction import EvictionPolicy
from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.cachepool.pool import Pool
from prfaas.events import PoolChange
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.types import BlockHash, Shard

_SLOT_BYTES = 64  # of memory that is never touched; what a block weighs only ranks it


def block_name(number: int) -> BlockHash:
    """The hash of a block that traffic knows by a number."""
    return BlockHash(number.to_bytes(HASH_BYTES, "little"))


class PrefixCache:
    """A pool of at most `max_blocks` attention blocks of `block_tokens` tokens, under one of the pool's own policies.

    Each use stands for itself: nothing is pinned from one to the next. `close` returns what the pool holds of the system.
    """

    def __init__(
        self,
        block_tokens: int,
        max_blocks: int,
        *,
        eviction: EvictionPolicy = "lru",
        on_change: Callable[[PoolChange], None] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._pool = Pool(2 * max_blocks * _SLOT_BYTES, eviction=eviction, on_change=on_change)
        self._arena = self._pool.arena(_layout(block_tokens))

    @property
    def num_blocks(self) -> int:
        """How many are here."""
        return self._pool.stats().slots_by_kind["prefix"]

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """How many tokens of a prompt with these blocks are here, from its start."""
        return _leading(self._pool.find_all(self._arena, 0, blocks)) * self.block_tokens

    def keep(self, blocks: Sequence[BlockHash]) -> None:
        """Use a chain: what is here is used once more, the rest is stored, as far as there is room."""
        pool, chain = self._pool, blocks[: self._max_blocks]
        found = pool.find_all(self._arena, 0, chain)
        held = _leading(found)
        lease = pool.open_lease("twin")
        if held:
            pool.pin(self._arena, [slot for slot in found[:held] if slot is not None], lease)
        if held < len(chain):
            slots = pool.allocate(self._arena, len(chain) - held, lease)
            assert slots is not None, "the transfer half takes as many blocks as the cache"
            parent, tokens = (chain[held - 1] if held else NO_HASH), (held + 1) * self.block_tokens
            pool.publish_run(self._arena, slots, group=0, hashes=chain[held:], parent=parent, num_tokens=tokens)
        pool.end_lease(lease)

    def close(self) -> None:
        """Give the pool's memory back; nothing is asked of it afterwards."""
        self._pool.close()


def _leading(found: Sequence[int | None]) -> int:
    return found.index(None) if None in found else len(found)


def _layout(block_tokens: int) -> Layout:
    units = -(-block_tokens // HASH_UNIT_TOKENS) * HASH_UNIT_TOKENS
    layer = LayerSlice("all", 0, _SLOT_BYTES, "uint8", "byte")
    return Layout("simulated", "", Shard(0, 1), (KVGroup("full_attention", units, (layer,)),))

"""A removal over random trees of prefixes in two tiers: the prefix and what follows it are gone, nothing else is."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.removal import removal
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout, prefix_groups
from prfaas.kv.parts import LayerSlice
from prfaas.types import BlockHash, GroupBlocks, Prefix, Shard
from tests.support.pool_integrity import check_integrity

SLOT_BYTES, NUM_SLOTS = 4096, 4096
LENGTHS = (16, 32, 40, 48, 64, 96, 100, 160, 224)
Tokens = tuple[int, ...]


def _layout(model: str, *groups: tuple[str, int, int]) -> Layout:
    layer = (LayerSlice("layer", 0, SLOT_BYTES, "bfloat16", "token"),)
    made = tuple(KVGroup(kind, block_tokens, layer, window or None) for kind, block_tokens, window in groups)
    return Layout(model, "", Shard(), made)


LAYOUTS = (
    _layout("dense", ("full_attention", 16, 0)),
    _layout("window", ("full_attention", 16, 0), ("sliding_window", 16, 40)),
    _layout("fine window", ("full_attention", 32, 0), ("sliding_window", 16, 33)),
    _layout("coarse window", ("full_attention", 16, 0), ("sliding_window", 32, 65)),
    _layout("two sizes", ("full_attention", 16, 0), ("full_attention", 32, 0)),
    _layout("states", ("full_attention", 16, 0), ("linear_state", 0, 0)),
    _layout("all", ("full_attention", 32, 0), ("sliding_window", 32, 65), ("linear_state", 0, 0)),
)


@dataclass(frozen=True)
class Block:
    """A stored block, and the tokens that its hash speaks of."""

    tier: int
    group: KVGroup
    position: int  # Index of the group in its layout.
    block_hash: BlockHash
    tokens: Tokens

    @property
    def start(self) -> Tokens:
        """The tokens before it."""
        return self.tokens[: (len(self.tokens) - 1) // self.group.block_tokens * self.group.block_tokens]


class Node:
    """Memory and SSD, each with parts of some prefixes."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout, self._rng = layout, rng
        self.tiers = [Pool(2 * NUM_SLOTS * SLOT_BYTES) for _ in range(2)]
        self._arenas = [pool.arena(layout) for pool in self.tiers]
        self.blocks: set[Block] = set()
        self.has_states = any(group.is_state for group in layout.groups)
        self.attention_sizes = [group.block_tokens for group in layout.groups if group.keeps_all_tokens]

    def store(self, tokens: Tokens) -> None:
        """Every group of a prefix, in one tier or the other."""
        chain = HashChain(root_hash(self.layout.model), tokens)
        prefix = Prefix(self.layout.model, b"".join(chain.units), len(tokens), chain.at(len(tokens)))
        for group in prefix_groups(self.layout, prefix, root=chain.root):
            self._store(chain, group, tokens, tier=self._rng.randrange(2))

    def _store(self, chain: HashChain, blocks: GroupBlocks, tokens: Tokens, *, tier: int) -> None:
        pool, group = self.tiers[tier], self.layout.groups[blocks.group]
        lease = pool.open_lease()
        for position, block_hash in enumerate(blocks.hashes):
            end = len(tokens)
            if not group.is_state:
                end = min((blocks.first_block + position + 1) * group.block_tokens, end)
            block = Block(tier, group, blocks.group, block_hash, tokens[:end])
            parent = blocks.parent if group.is_state else chain.at(len(block.start))
            taken = pool.allocate(self._arenas[tier], 1, lease)
            assert taken is not None
            if pool.publish(self._arenas[tier], taken[0], BlockIdentity(blocks.group, block_hash, parent, end, parent)):
                self.blocks.add(block)
        pool.end_lease(lease)

    def remove(self, tokens: Tokens) -> set[Block]:
        """Remove the prefix of these tokens, and return the blocks that left."""
        end_hash = HashChain(root_hash(self.layout.model), tokens).at(len(tokens))
        cuts = removal([slots for pool in self.tiers for slots in pool.tables], end_hash)
        num_bytes = sum(pool.cut(cuts) for pool in self.tiers)
        gone = {block for block in self.blocks if not self._is_here(block)}
        assert num_bytes == len(gone) * SLOT_BYTES
        return gone

    def _is_here(self, block: Block) -> bool:
        return self.tiers[block.tier].find(self._arenas[block.tier], block.position, block.block_hash) is not None

    def close(self) -> None:
        for pool in self.tiers:
            check_integrity(pool)
            pool.close()


class Expected:
    """By looking at the tokens of every block, what has to leave with a prefix."""

    def __init__(self, node: Node, end: Tokens) -> None:
        self._end = end
        self._ends_within = any(len(end) % size for size in node.attention_sizes)
        self._path = {start for size in node.attention_sizes for start in range(0, len(end), size)}
        self._path.add(len(end))
        windows = [
            block for block in node.blocks if block.group.kind == "sliding_window" and self._begins(block.tokens)
        ]
        for block in sorted(windows, key=lambda window: -len(window.tokens)):
            if len(block.tokens) in self._path:
                self._path.add(len(block.start))
        self._kept_tokens = max(map(self._kept_by, node.blocks), default=0)

    def _begins(self, tokens: Tokens) -> bool:
        """Return whether the prefix begins with these tokens."""
        return self._end[: len(tokens)] == tokens

    def _is_on_path(self, tokens: Tokens) -> bool:
        """Return whether these tokens begin the prefix and some block's hash leads to them."""
        return len(tokens) < len(self._end) and len(tokens) in self._path and self._begins(tokens)

    def _follows(self, tokens: Tokens) -> bool:
        return tokens == self._end if self._ends_within else tokens[: len(self._end)] == self._end

    def _kept_by(self, block: Block) -> int:
        """Return the length up to which a block needs the prefix."""
        if self._follows(block.tokens):
            return 0
        if self._is_on_path(block.tokens):
            return len(block.tokens) if block.group.is_state else 0
        is_hung = not block.group.is_state and self._is_on_path(block.start)
        return len(block.start) if is_hung else 0

    def leaves(self, block: Block) -> bool:
        """Return whether a block has to leave."""
        is_beyond = len(block.tokens) > self._kept_tokens
        return self._follows(block.tokens) or (self._is_on_path(block.tokens) and is_beyond)


def _prompts(rng: random.Random) -> list[Tokens]:
    """A tree of them, in tokens that are few."""
    found: list[Tokens] = [()]
    for _ in range(rng.randint(1, 8)):
        shared = rng.choice(found)[: rng.choice((0, *LENGTHS))]
        found.append(shared + tuple(rng.randrange(3) for _ in range(max(LENGTHS))))
    return found[1:]


@given(seed=st.integers(0, 1 << 32), layout=st.sampled_from(LAYOUTS))
def test_removal_takes_a_prefix_and_its_followers_and_nothing_else(seed: int, layout: Layout) -> None:
    rng = random.Random(seed)
    node = Node(layout, rng)
    step = 1 if node.has_states else max(group.block_tokens for group in layout.groups)
    ends = [prompt[: rng.choice(LENGTHS)] for prompt in _prompts(rng)]
    for tokens in ends:
        node.store(tokens)
    chosen = rng.choice(ends)
    end = chosen[: len(chosen) // step * step]
    expected = Expected(node, end)
    gone = node.remove(end) if end else set()
    for block in node.blocks if end else ():
        leaves = expected.leaves(block)
        assert leaves == (block in gone), (len(end), len(block.tokens), block.group, block.tier)
    node.close()

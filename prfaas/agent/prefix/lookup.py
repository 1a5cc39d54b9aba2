"""What this node holds of one layout, in memory or on its SSD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.kinds import KINDS
from prfaas.kv.match import HeldBlocks, MatchRules, match_prefix
from prfaas.types import BlockHash


class LocalHoldings:
    """Answers for one moment: it is asked and forgotten."""

    def __init__(self, pool: Pool, ssd: SsdTier | None, arena: Arena) -> None:
        self._pool = pool
        self._ssd = ssd
        self.arena = arena

    def has(self, group: int, block_hash: BlockHash) -> bool:
        return self.have(group, [block_hash])[0]

    def have(self, group: int, hashes: Sequence[BlockHash]) -> list[bool]:
        """Of each block whether it is held."""
        found = [slot is not None for slot in self._pool.find_all(self.arena, group, hashes)]
        if self._ssd is None or all(found):
            return found
        below = self._ssd.holds(self.arena.layout, group, hashes)
        return [above or its for above, its in zip(found, below, strict=True)]

    def parent(self, group: int, block_hash: BlockHash) -> BlockHash | None:
        """The parent of a block, when it is held."""
        slot = self._pool.find(self.arena, group, block_hash)
        if slot is not None:
            return self._pool.identity(self.arena, slot).parent
        below = None if self._ssd is None else self._ssd.identity(self.arena.layout, group, block_hash)
        return None if below is None else below.parent

    def states_after(self, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """As `Pool.states_after`."""
        found = self._pool.states_after(self.arena, group, unit)
        return found if self._ssd is None else self._ssd.states_after(self.arena.layout, group, unit) | found


MAX_UNCERTAIN = 32  # states whose tokens only the engine can tell, looked at for one prompt


def servable_lengths(
    ranks: Sequence[LocalHoldings], path: list[BlockHash], limit_tokens: int
) -> list[tuple[int, BlockHash]]:
    """What all ranks can serve of a prompt, longest first; `path[i]` is the hash of its first 16·i tokens.

    A state within 16 tokens may be another prompt's that only begins alike, which the engine can tell by its hash. One at
    their end is this prompt's for certain: it is the last of the list.
    """
    reaches = [_Reach(rank, path) for rank in ranks]
    states = reaches[0].rules.states
    if not states:
        length = min(reach.usable_tokens(limit_tokens) for reach in reaches)
        is_served = length and all(reach.usable_tokens(length) == length for reach in reaches)
        return [(length, path[length // HASH_UNIT_TOKENS])] if is_served else []
    found, num_uncertain = [], 0
    for length, block_hash in _states(ranks[0], states, path, limit_tokens):
        is_certain = length % HASH_UNIT_TOKENS == 0
        num_uncertain += not is_certain
        if not is_certain and num_uncertain > MAX_UNCERTAIN:
            continue
        if all(reach.serves_state(length, block_hash) for reach in reaches):
            found.append((length, block_hash))
            if is_certain:
                break
    return found


class _Reach:
    """What one rank's arena holds of a prompt's full blocks."""

    def __init__(self, node: LocalHoldings, path: list[BlockHash]) -> None:
        self._node = node
        groups = node.arena.layout.groups
        self.rules = MatchRules(groups)
        self._blocks = tuple(_bitmap(node, index, path) for index in range(len(groups)))

    def usable_tokens(self, limit_tokens: int) -> int:
        """Of a model without states."""
        held = HeldBlocks(self._blocks, (0,) * len(self._blocks))
        return match_prefix(self.rules, held, limit_tokens).usable_tokens

    def serves_state(self, length: int, block_hash: BlockHash) -> bool:
        """Whether the state after `length` tokens is here, and all else that belongs to it."""
        has = (self._node.has(index, block_hash) for index in range(len(self._blocks)))
        held = HeldBlocks(self._blocks, tuple(map(int, has)), [length])
        return match_prefix(self.rules, held, length).usable_tokens == length


def tokens_by_kind(node: LocalHoldings, path: list[BlockHash], limit_tokens: int) -> dict[str, int]:
    """By kind of KV group, how much of a prompt one rank's groups of that kind could serve if they were the only ones."""
    groups = node.arena.layout.groups
    found: dict[str, int] = {}
    for kind in dict.fromkeys(group.kind for group in groups):
        places = tuple(index for index, group in enumerate(groups) if group.kind == kind)
        if KINDS[kind].is_state:
            found[kind] = next((length for length, _ in _states(node, places, path, limit_tokens)), 0)
            continue
        rules = MatchRules([groups[index] for index in places])
        blocks = tuple(_bitmap(node, index, path) for index in places)
        usable = match_prefix(rules, HeldBlocks(blocks, (0,) * len(places)), limit_tokens)
        found[kind] = limit_tokens if usable.reason == "complete" else usable.usable_tokens
    return found


def _bitmap(node: LocalHoldings, group: int, path: list[BlockHash]) -> int:
    """Bit j is set when block j of the prompt is held."""
    if node.arena.layout.groups[group].is_state:
        return 0
    step = node.arena.layout.groups[group].block_tokens // HASH_UNIT_TOKENS
    held = node.have(group, path[step::step])
    return int("0" + "".join("1" if its else "0" for its in reversed(held)), 2)


def _states(
    node: LocalHoldings, linear: tuple[int, ...], path: list[BlockHash], limit_tokens: int
) -> Iterator[tuple[int, BlockHash]]:
    """States on the prompt's path that every linear group holds, longest first."""
    for unit in reversed(path):
        found = node.states_after(linear[0], unit)
        for block_hash, length in sorted(found.items(), key=lambda item: -item[1]):
            everywhere = all(node.has(group, block_hash) for group in linear)
            if everywhere and length <= limit_tokens:
                yield length, block_hash

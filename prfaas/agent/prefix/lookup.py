"""Lengths of a prompt that this node's blocks can serve."""

from collections.abc import Iterator, Sequence

from prfaas.agent.prefix.promotion import LocalHoldings
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.match import HeldBlocks, MatchRules, match_prefix
from prfaas.types import BlockHash

# Candidate states for one prompt whose tokens only the engine can compare.
MAX_CANDIDATES = 32


def servable_lengths(
    ranks: Sequence[LocalHoldings], path: list[BlockHash], limit_tokens: int
) -> list[tuple[int, BlockHash]]:
    """Return the lengths that all ranks can serve, longest first; `path[i]` is the hash of the first 16·i tokens.

    A linear state between two hash units may belong to another prompt with the same start. It is a candidate: the engine
    compares its hash. A state at the end of a unit belongs to this prompt, so the list ends there.
    """
    rank_blocks = [_RankBlocks(rank, path) for rank in ranks]
    linear_groups = rank_blocks[0].rules.states
    if not linear_groups:
        length = min(rank.usable_tokens(limit_tokens) for rank in rank_blocks)
        is_servable = length and all(rank.usable_tokens(length) == length for rank in rank_blocks)
        return [(length, path[length // HASH_UNIT_TOKENS])] if is_servable else []
    found, num_candidates = [], 0
    for length, block_hash in _states(ranks[0], linear_groups, path, limit_tokens):
        is_certain = length % HASH_UNIT_TOKENS == 0
        num_candidates += not is_certain
        if not is_certain and num_candidates > MAX_CANDIDATES:
            continue
        if all(rank.serves_state(length, block_hash) for rank in rank_blocks):
            found.append((length, block_hash))
            if is_certain:
                break
    return found


class _RankBlocks:
    """Full blocks of a prompt that one rank's arena holds."""

    def __init__(self, holdings: LocalHoldings, path: list[BlockHash]) -> None:
        self._holdings = holdings
        groups = holdings.arena.layout.groups
        self.rules = MatchRules(groups)
        self._bitmaps = tuple(_bitmap(holdings, index, path) for index in range(len(groups)))

    def usable_tokens(self, limit_tokens: int) -> int:
        """Return the usable prefix of a model without linear states."""
        held = HeldBlocks(self._bitmaps, (0,) * len(self._bitmaps))
        return match_prefix(self.rules, held, limit_tokens).usable_tokens

    def serves_state(self, length: int, block_hash: BlockHash) -> bool:
        """Return whether the state after `length` tokens and all blocks that it needs are held."""
        has_state = (self._holdings.has(index, block_hash) for index in range(len(self._bitmaps)))
        held = HeldBlocks(self._bitmaps, tuple(map(int, has_state)), [length])
        return match_prefix(self.rules, held, length).usable_tokens == length


def _bitmap(holdings: LocalHoldings, group: int, path: list[BlockHash]) -> int:
    """Return a bitmap whose bit j is set if block j of the prompt is held."""
    if holdings.arena.layout.groups[group].is_state:
        return 0
    step = holdings.arena.layout.groups[group].block_tokens // HASH_UNIT_TOKENS
    held = holdings.have(group, path[step::step])
    return int("0" + "".join("1" if is_held else "0" for is_held in reversed(held)), 2)


def _states(
    holdings: LocalHoldings, linear_groups: tuple[int, ...], path: list[BlockHash], limit_tokens: int
) -> Iterator[tuple[int, BlockHash]]:
    """Yield the states on the prompt's path that every linear group holds, longest first."""
    for unit in reversed(path):
        found = holdings.states_after(linear_groups[0], unit)
        for block_hash, length in sorted(found.items(), key=lambda item: -item[1]):
            is_complete = all(holdings.has(group, block_hash) for group in linear_groups)
            if is_complete and length <= limit_tokens:
                yield length, block_hash

"""Matching: from held bits to a result. Shards are joined, KV groups combined, nodes ranked."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import and_

from prfaas.index.query import MatchResult, NodeMatch
from prfaas.kv.layout import Layout
from prfaas.kv.match import HeldBlocks, MatchRules, PrefixMatch, match_prefix
from prfaas.types import AgentName, ClusterName

_Ranked = tuple[int, int, NodeMatch]  # Usable and attention tokens, negated so that the best match sorts first.


@dataclass(frozen=True, eq=False)
class EngineShape:
    """Everything that two nodes' layouts must share for their blocks to add up.

    An index has one object of each shape, compared by identity, since it is a key on the hot path.
    """

    cluster: ClusterName
    num_ranks: int
    rules: MatchRules

    @property
    def num_places(self) -> int:
        """Number of places for block bits; as many for checkpoints follow them."""
        return len(self.rules.groups) * self.num_ranks

    def place(self, group: int, rank: int) -> int:
        """Return the place of one group's and rank's block bits in `MatchEvidence`."""
        return group * self.num_ranks + rank

    def held(self, found: Sequence[int], ends: Sequence[int]) -> HeldBlocks:
        """Return the blocks that every rank holds: a block counts when all its shards are there."""
        if self.num_ranks > 1:
            ranks = range(0, len(found), self.num_ranks)
            found = [functools.reduce(and_, found[first : first + self.num_ranks]) for first in ranks]
        num_groups = len(self.rules.groups)
        return HeldBlocks(tuple(found[:num_groups]), tuple(found[num_groups:]), ends)


@dataclass(frozen=True, eq=False)
class NodeEngine:
    """Layouts of one node that are the ranks of one engine shape. Compared by identity as well."""

    node: AgentName
    shape: EngineShape


HeldBits = tuple[NodeEngine, int, int]  # Engine, place and bits.


class EngineShapes:
    """Every engine shape of an index."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[object, ...], EngineShape] = {}

    def shape_of(self, layout: Layout, cluster: ClusterName) -> EngineShape:
        groups = tuple(replace(group, layers=()) for group in layout.groups)
        key = (cluster, layout.model, layout.packing, layout.shard.size, groups)
        known = self._shapes.get(key)
        if known is None:
            # Shapes of one model share their rules, by which equal matches and unions are found.
            same = (shape.rules for shape in self._shapes.values() if shape.rules.groups == groups)
            rules = next(same, None) or MatchRules(groups)
            known = self._shapes[key] = EngineShape(cluster, layout.shard.size, rules)
        return known

    def keep(self, used: Set[EngineShape]) -> None:
        """Forget every other shape."""
        self._shapes = {key: shape for key, shape in self._shapes.items() if shape in used}


class MatchEvidence:
    """Bits found for one prompt, per engine and place (`EngineShape.place`).

    The places of blocks hold bits over the prompt's blocks. As many places follow with bits over the lengths of
    checkpoints.
    """

    def __init__(self, limit_tokens: int) -> None:
        self._ends: Sequence[int] = ()  # Ascending lengths at which a checkpoint ends.
        self._limit_tokens = limit_tokens
        self._found: dict[NodeEngine, list[int]] = {}

    def add(self, engine: NodeEngine, place: int, bits: int) -> None:
        """Add bits at a place of one engine."""
        found = self._found.get(engine)
        if found is None:
            found = self._found[engine] = [0] * (2 * engine.shape.num_places)
        found[place] |= bits

    def add_exact(
        self, lengths: Sequence[int], entries: Sequence[HeldBits], marks: Mapping[int, Sequence[HeldBits]]
    ) -> None:
        """Add checkpoints: `entries` over ascending `lengths`, and by block size the `marks` over the ends of blocks."""
        if not lengths and len(marks) == 1:
            ((grid, found),) = marks.items()
            num_blocks = max(bits.bit_length() for _, _, bits in found)
            self._ends = range(grid, (num_blocks + 1) * grid, grid)
            for engine, place, bits in found:
                self.add(engine, place, bits)
            return
        at = [(engine, place, [lengths[index] for index in _ones(bits)]) for engine, place, bits in entries]
        for grid, found in marks.items():
            at += [(engine, place, [(index + 1) * grid for index in _ones(bits)]) for engine, place, bits in found]
        self._ends = sorted({length for _, _, ends in at for length in ends})
        positions = {length: position for position, length in enumerate(self._ends)}
        for engine, place, ends in at:
            self.add(engine, place, sum(1 << positions[length] for length in ends))

    def result(self, odd_lengths: Iterable[int]) -> MatchResult:
        """Return nodes, best first, and the `odd_lengths` that would beat every node."""
        nodes: list[_Ranked] = []
        known: dict[tuple[object, ...], PrefixMatch] = {}  # Many nodes hold the same blocks of a prompt.
        for engine, found in self._found.items():
            shape = engine.shape
            key = (shape.rules, *found)
            match = known.get(key)
            if match is None:
                match = known[key] = match_prefix(shape.rules, shape.held(found, self._ends), self._limit_tokens)
            nodes.append((-match[0], -match[1], _new(NodeMatch, (engine.node, shape.cluster, *match))))
        ranked = _best_of_each(nodes)
        best = ranked[0].usable_tokens if ranked else 0
        longer = tuple([length for length in odd_lengths if length > best])
        return MatchResult(tuple(ranked), longer)


def _ones(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _best_of_each(rows: list[_Ranked]) -> list[NodeMatch]:
    """Return useful matches, best first, then by name. Of a node with two shapes only the better one."""
    rows.sort()
    useful = [row[2] for row in rows if row[0] or row[1]]
    best = {match[0]: match for match in reversed(useful)}
    return useful if len(best) == len(useful) else [match for match in useful if best[match[0]] is match]


_new = tuple.__new__  # A named tuple's own constructor takes twice as long.

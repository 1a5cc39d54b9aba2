"""From held bits to an answer: shards joined, KV groups combined, nodes and clusters ranked."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import and_, or_
from typing import NamedTuple, TypeVar

from prfaas.index.query import ClusterMatch, MatchResult, NodeMatch
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.match import HeldBlocks, MatchRules, PrefixMatch, match_prefix
from prfaas.types import AgentName, ClusterName

Match = TypeVar("Match", NodeMatch, ClusterMatch)
_Ranked = tuple[int, int, Match]  # usable and attention tokens, negated: sorted, the best comes first


class EngineShapeKey(NamedTuple):
    """What two nodes must share for their blocks to add up: all of a layout that its ranks have in common."""

    cluster: ClusterName
    model: str
    packing: str
    num_ranks: int
    groups: tuple[KVGroup, ...]


@dataclass(frozen=True, eq=False)
class EngineShape:
    """One such kind. An index has one object of each, compared by identity: it is a key on the hot path."""

    cluster: ClusterName
    packing: str
    num_ranks: int
    rules: MatchRules

    @property
    def num_places(self) -> int:
        """Of blocks; checkpoints have as many behind them."""
        return len(self.rules.groups) * self.num_ranks

    def place(self, group: int, rank: int) -> int:
        """Where `Evidence` has the block bits of one group and rank."""
        return group * self.num_ranks + rank

    def held(self, found: Sequence[int], ends: Sequence[int]) -> HeldBlocks:
        """What every rank holds: a block counts when all its shards are there."""
        if self.num_ranks > 1:
            ranks = range(0, len(found), self.num_ranks)
            found = [functools.reduce(and_, found[first : first + self.num_ranks]) for first in ranks]
        num_groups = len(self.rules.groups)
        return HeldBlocks(tuple(found[:num_groups]), tuple(found[num_groups:]), ends)


@dataclass(frozen=True, eq=False)
class NodeEngine:
    """The layouts of one node that are the ranks of one engine shape; compared by identity as well."""

    node: AgentName
    kind: EngineShape


HeldBits = tuple[NodeEngine, int, int]  # whose, at which place, which bits


class EngineShapes:
    """Every kind that an index has met."""

    def __init__(self) -> None:
        self._known: dict[EngineShapeKey, EngineShape] = {}
        self._rules: dict[tuple[KVGroup, ...], MatchRules] = {}

    def of(self, layout: Layout, cluster: ClusterName) -> EngineShape:
        groups = tuple(group.without_layers for group in layout.groups)
        key = EngineShapeKey(cluster, layout.model, layout.packing, layout.shard.size, groups)
        rules = self._rules.setdefault(groups, MatchRules(groups))
        return self._known.setdefault(key, EngineShape(cluster, layout.packing, layout.shard.size, rules))

    def keep(self, used: Set[EngineShape]) -> None:
        """Forget every other kind."""
        self._known = {key: kind for key, kind in self._known.items() if kind in used}
        self._rules = {key.groups: kind.rules for key, kind in self._known.items()}


class MatchEvidence:
    """What was found of one prompt, per family, group and rank (`Kind.place`): bits over the prompt's blocks, and behind
    those of all places as many over the lengths of checkpoints."""

    def __init__(self, limit_tokens: int) -> None:
        self._ends: Sequence[int] = ()  # lengths at which some checkpoint ends, ascending
        self._limit_tokens = limit_tokens
        self._found: dict[NodeEngine, list[int]] = {}

    def add(self, family: NodeEngine, place: int, bits: int) -> None:
        """Note `bits` at a place of what was found of one family."""
        found = self._found.get(family)
        if found is None:
            found = self._found[family] = [0] * (2 * family.kind.num_places)
        found[place] |= bits

    def add_exact(
        self, lengths: Sequence[int], entries: Sequence[HeldBits], marks: Mapping[int, Sequence[HeldBits]]
    ) -> None:
        """Note what is valid at exact lengths: `entries` over `lengths`, ascending, and by a block's tokens the `marks`
        over the ends of such blocks. Their places are those of checkpoints."""
        if not lengths and len(marks) == 1:
            ((grid, found),) = marks.items()
            num_blocks = max(bits.bit_length() for _, _, bits in found)
            self._ends = range(grid, (num_blocks + 1) * grid, grid)
            for family, place, bits in found:
                self.add(family, place, bits)
            return
        named = [(family, place, [lengths[one] for one in _ones(bits)]) for family, place, bits in entries]
        for grid, found in marks.items():
            named += [(family, place, [(one + 1) * grid for one in _ones(bits)]) for family, place, bits in found]
        self._ends = sorted({length for _, _, at in named for length in at})
        positions = {length: position for position, length in enumerate(self._ends)}
        for family, place, at in named:
            self.add(family, place, sum(1 << positions[length] for length in at))

    def answer(self, odd_lengths: Iterable[int], *, with_world: bool = False) -> MatchResult:
        """Nodes and clusters, best first; of `odd_lengths` those that would beat every node."""
        nodes: list[_Ranked[NodeMatch]] = []
        clusters: list[_Ranked[ClusterMatch]] = []
        by_kind: dict[EngineShape, list[list[int]]] = {}
        alone: dict[EngineShape, PrefixMatch] = {}  # of the kinds that one family is of
        known: dict[tuple[object, ...], PrefixMatch] = {}  # many nodes hold the same of a prompt
        for family, found in self._found.items():
            kind = family.kind
            what = (kind.rules, *found)
            its = known.get(what)
            if its is None:
                its = known[what] = self._usable(kind, found)
            nodes.append((-its[0], -its[1], _new(NodeMatch, (family.node, kind.cluster, *its))))
            by_kind.setdefault(kind, []).append(found)
            alone[kind] = its
        for kind, places in by_kind.items():
            its = alone[kind] if len(places) == 1 else self._together(kind, places)
            clusters.append((-its[0], -its[1], _new(ClusterMatch, (kind.cluster, *its))))
        ranked = _best_of_each(nodes)
        best = ranked[0].usable_tokens if ranked else 0
        beyond = tuple([length for length in odd_lengths if length > best])
        world = self._everywhere() if with_world else None
        return MatchResult(tuple(ranked), tuple(_best_of_each(clusters)), beyond, world)

    def _usable(self, kind: EngineShape, bits: Sequence[int]) -> PrefixMatch:
        return match_prefix(kind.rules, kind.held(bits, self._ends), self._limit_tokens)

    def _together(self, kind: EngineShape, places: Sequence[Sequence[int]]) -> PrefixMatch:
        """What several nodes of one kind can serve."""
        held = _union([kind.held(bits, self._ends) for bits in places])
        return match_prefix(kind.rules, held, self._limit_tokens)

    def _everywhere(self) -> PrefixMatch:
        """What the nodes of all clusters can serve; of unlike engine shapes, whose blocks do not add up, the best."""
        by_shape: dict[tuple[MatchRules, int, str], list[HeldBlocks]] = {}
        for family, found in self._found.items():
            kind = family.kind
            shape = (kind.rules, kind.num_ranks, kind.packing)
            by_shape.setdefault(shape, []).append(kind.held(found, self._ends))
        its = [match_prefix(shape[0], _union(held), self._limit_tokens) for shape, held in by_shape.items()]
        return max(its, key=lambda usable: usable[:2], default=PrefixMatch(0, 0, "nothing"))


def _ones(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _union(places: Sequence[HeldBlocks]) -> HeldBlocks:
    blocks = [functools.reduce(or_, bits) for bits in zip(*(place.blocks for place in places), strict=True)]
    exact = [functools.reduce(or_, bits) for bits in zip(*(place.exact for place in places), strict=True)]
    return HeldBlocks(tuple(blocks), tuple(exact), places[0].ends)


def _best_of_each(rows: list[_Ranked[Match]]) -> list[Match]:
    """Best first, then by name, what is of any use; of a node or cluster with two engine shapes the better one."""
    rows.sort()
    useful = [row[2] for row in rows if row[0] or row[1]]
    best = {its[0]: its for its in reversed(useful)}
    return useful if len(best) == len(useful) else [its for its in useful if best[its[0]] is its]


_new = tuple.__new__  # a named tuple's own constructor takes twice as long

"""From held bits to an answer: shards joined, KV groups combined, nodes and clusters ranked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import and_, itemgetter, or_
from typing import NamedTuple, TypeVar

from prfaas.cachepool.layout import Layout
from prfaas.index.query import Answer, ClusterMatch, NodeMatch
from prfaas.index.usable import GroupShape, Held, Rules, Usable, usable_prefix
from prfaas.types import AgentName, ClusterName

Match = TypeVar("Match", NodeMatch, ClusterMatch)


class KindKey(NamedTuple):
    """What two nodes must share for their blocks to add up: all of a layout that its ranks have in common."""

    cluster: ClusterName
    model: str
    packing: str
    num_ranks: int
    shapes: tuple[GroupShape, ...]


@dataclass(frozen=True, eq=False)
class Kind:
    """One such kind. An index has one object of each, compared by identity: it is a key on the hot path."""

    cluster: ClusterName
    num_ranks: int
    rules: Rules

    def place(self, group: int, rank: int) -> int:
        """Where `Found` has the bits of one group and rank."""
        return group * self.num_ranks + rank


@dataclass(frozen=True, eq=False)
class Family:
    """The layouts of one node that are the ranks of one engine shape; compared by identity as well."""

    node: AgentName
    kind: Kind


class Kinds:
    """Every kind that an index has met."""

    def __init__(self) -> None:
        self._known: dict[KindKey, Kind] = {}
        self._rules: dict[tuple[GroupShape, ...], Rules] = {}

    def of(self, layout: Layout, cluster: ClusterName) -> Kind:
        shapes = tuple(GroupShape(group.kind, group.block_tokens, group.window_tokens or 0) for group in layout.groups)
        key = KindKey(cluster, layout.model, layout.packing, layout.shard.size, shapes)
        rules = self._rules.setdefault(shapes, Rules(shapes))
        return self._known.setdefault(key, Kind(cluster, layout.shard.size, rules))

    def keep(self, used: Set[Kind]) -> None:
        """Forget every other kind."""
        self._known = {key: kind for key, kind in self._known.items() if kind in used}
        self._rules = {key.shapes: kind.rules for key, kind in self._known.items()}


class Evidence:
    """What was found of one prompt, per family: blocks and checkpoints of every rank."""

    def __init__(self, limit_tokens: int) -> None:
        self.ends: Sequence[int] = ()  # lengths at which some checkpoint ends, ascending
        self._limit_tokens = limit_tokens
        self._found: dict[Family, Found] = {}

    def of(self, family: Family) -> Found:
        """What was found of one family, to be added to."""
        found = self._found.get(family)
        if found is None:
            found = self._found[family] = Found(family.kind)
        return found

    def answer(self, odd_lengths: Iterable[int]) -> Answer:
        """Nodes and clusters, best first; of `odd_lengths` those that would beat every node."""
        nodes: list[NodeMatch] = []
        by_kind: dict[Kind, list[tuple[Held, Usable]]] = {}
        known: dict[tuple[Rules, Sequence[int], Sequence[int]], Usable] = {}  # many nodes hold the same of a prompt
        for family, found in self._found.items():
            kind, held = family.kind, found.held(self.ends)
            what = (kind.rules, held.blocks, held.exact)
            its = known.get(what)
            if its is None:
                its = known[what] = usable_prefix(kind.rules, held, self._limit_tokens)
            nodes.append(NodeMatch(family.node, kind.cluster, *its))
            by_kind.setdefault(kind, []).append((held, its))
        clusters = [
            ClusterMatch(kind.cluster, *(places[0][1] if len(places) == 1 else self._together(kind, places)))
            for kind, places in by_kind.items()
        ]
        nodes = _best_of_each(nodes, _NODE_TOKENS)
        best = nodes[0].usable_tokens if nodes else 0
        beyond = tuple(length for length in odd_lengths if length > best)
        return Answer(tuple(nodes), tuple(_best_of_each(clusters, _CLUSTER_TOKENS)), beyond)

    def _together(self, kind: Kind, places: Sequence[tuple[Held, Usable]]) -> Usable:
        """What several nodes of one kind can serve."""
        return usable_prefix(kind.rules, _union([held for held, _ in places]), self._limit_tokens)


class Found:
    """Bits per group and rank (`Kind.place`): over the prompt's blocks, and over the lengths at which checkpoints end."""

    __slots__ = ("_num_ranks", "blocks", "exact")

    def __init__(self, kind: Kind) -> None:
        self._num_ranks = kind.num_ranks
        self.blocks = [0] * (len(kind.rules.shapes) * kind.num_ranks)
        self.exact = self.blocks.copy()

    def held(self, ends: Sequence[int]) -> Held:
        """What every rank holds: a block counts when all its shards are there."""
        if self._num_ranks == 1:
            return Held(tuple(self.blocks), tuple(self.exact), ends)
        return Held(_in_every_rank(self.blocks, self._num_ranks), _in_every_rank(self.exact, self._num_ranks), ends)


def _in_every_rank(bits: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    groups = range(0, len(bits), num_ranks)
    return tuple([functools.reduce(and_, bits[first : first + num_ranks]) for first in groups])


def _union(places: Sequence[Held]) -> Held:
    blocks = [functools.reduce(or_, bits) for bits in zip(*(its.blocks for its in places), strict=True)]
    exact = [functools.reduce(or_, bits) for bits in zip(*(its.exact for its in places), strict=True)]
    return Held(tuple(blocks), tuple(exact), places[0].ends)


def _best_of_each(matches: list[Match], tokens: Callable[[Match], tuple[int, int]]) -> list[Match]:
    """Best first what is of any use; of a node or cluster with two engine shapes the better one."""
    matches.sort(key=_NAME)
    matches.sort(key=tokens, reverse=True)
    best: dict[str, Match] = {}
    for its in matches:
        if its.usable_tokens or its.attention_tokens:
            best.setdefault(its[0], its)
    return list(best.values())


_NAME = itemgetter(0)
_NODE_TOKENS: Callable[[NodeMatch], tuple[int, int]] = itemgetter(2, 3)  # usable, attention
_CLUSTER_TOKENS: Callable[[ClusterMatch], tuple[int, int]] = itemgetter(1, 2)

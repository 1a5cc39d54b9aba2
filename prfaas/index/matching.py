"""From held bits to an answer: shards joined, KV groups combined, nodes and clusters ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prfaas.cachepool.layout import Layout
from prfaas.index.query import Answer, ClusterMatch, NodeMatch
from prfaas.index.usable import GroupShape, Held, Usable, usable_prefix
from prfaas.types import AgentName, ClusterName

Match = TypeVar("Match", NodeMatch, ClusterMatch)


@dataclass(frozen=True)
class Kind:
    """What two nodes must share for their blocks to add up: all of a layout that its ranks have in common."""

    cluster: ClusterName
    model: str
    packing: str
    num_ranks: int
    shapes: tuple[GroupShape, ...]


@dataclass(frozen=True, eq=False)
class Family:
    """The layouts of one node that are the ranks of one engine shape; compared by identity, it is a key on the hot
    path."""

    node: AgentName
    kind: Kind


def kind_of(layout: Layout, cluster: ClusterName) -> Kind:
    shapes = tuple(GroupShape(group.kind, group.block_tokens, group.window_tokens or 0) for group in layout.groups)
    return Kind(cluster, layout.model, layout.packing, layout.shard.size, shapes)


class Evidence:
    """What was found of one prompt, per family: blocks and checkpoints of every rank."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._found: dict[Family, _Found] = {}

    def add_blocks(self, family: Family, *, group: int, rank: int, bits: int) -> None:
        self._of(family).blocks[group][rank] |= bits

    def add_exact(self, family: Family, *, group: int, rank: int, num_tokens: int) -> None:
        ranks = self._of(family).exact[group]
        ranks[num_tokens] = ranks.get(num_tokens, 0) | 1 << rank

    def _of(self, family: Family) -> _Found:
        found = self._found.get(family)
        if found is None:
            found = self._found[family] = _Found(family.kind)
        return found

    def answer(self, odd_lengths: Iterable[int]) -> Answer:
        """Nodes and clusters, best first; of `odd_lengths` those that would beat every node."""
        held = [(family, found.held()) for family, found in self._found.items()]
        usable = [(family, self._usable(family.kind, held_here)) for family, held_here in held]
        nodes = _best_first(
            NodeMatch(family.node, family.kind.cluster, its.usable_tokens, its.attention_tokens, its.reason)
            for family, its in usable
        )
        clusters = _best_first(
            ClusterMatch(kind.cluster, its.usable_tokens, its.attention_tokens, its.reason)
            for kind, its in self._over_clusters(held, usable)
        )
        best = nodes[0].usable_tokens if nodes else 0
        beyond = tuple(length for length in odd_lengths if length > best)
        return Answer(tuple(_first_each(nodes)), tuple(_first_each(clusters)), beyond)

    def _over_clusters(
        self, held: Sequence[tuple[Family, Held]], usable: Sequence[tuple[Family, Usable]]
    ) -> list[tuple[Kind, Usable]]:
        """One entry per kind of engine; where a single node holds anything, its own answer."""
        by_kind: dict[Kind, list[int]] = {}
        for index, (family, _) in enumerate(held):
            by_kind.setdefault(family.kind, []).append(index)
        return [
            (
                kind,
                usable[members[0]][1]
                if len(members) == 1
                else self._usable(kind, _union([held[i][1] for i in members])),
            )
            for kind, members in by_kind.items()
        ]

    def _usable(self, kind: Kind, held: Held) -> Usable:
        return usable_prefix(kind.shapes, held, self._limit_tokens)


class _Found:
    """Bits per group and rank, and per group the ranks that hold a checkpoint of a length."""

    def __init__(self, kind: Kind) -> None:
        self.blocks = [[0] * kind.num_ranks for _ in kind.shapes]
        self.exact: list[dict[int, int]] = [{} for _ in kind.shapes]
        self._all_ranks = (1 << kind.num_ranks) - 1

    def held(self) -> Held:
        """What every rank holds: a block counts when all its shards are there."""
        blocks = tuple(_intersection(ranks) for ranks in self.blocks)
        exact = tuple(
            frozenset(length for length, ranks in lengths.items() if ranks == self._all_ranks) for lengths in self.exact
        )
        return Held(blocks, exact)


def _intersection(bitmaps: list[int]) -> int:
    joined = bitmaps[0]
    for bits in bitmaps[1:]:
        joined &= bits
    return joined


def _union(places: Sequence[Held]) -> Held:
    blocks, exact = list(places[0].blocks), list(places[0].exact)
    for place in places[1:]:
        blocks = [ours | theirs for ours, theirs in zip(blocks, place.blocks, strict=True)]
        exact = [ours | theirs for ours, theirs in zip(exact, place.exact, strict=True)]
    return Held(tuple(blocks), tuple(exact))


def _best_first(matches: Iterable[Match]) -> list[Match]:
    useful = (match for match in matches if match.usable_tokens or match.attention_tokens)
    return sorted(useful, key=_rank)


def _first_each(matches: list[Match]) -> list[Match]:
    """The best of each node or cluster: two engine shapes on one node are two matches."""
    best: dict[str, Match] = {}
    for match in matches:
        best.setdefault(_name(match), match)
    return list(best.values())


def _name(match: NodeMatch | ClusterMatch) -> str:
    return match.node if isinstance(match, NodeMatch) else match.cluster


def _rank(match: NodeMatch | ClusterMatch) -> tuple[int, int, str]:
    return -match.usable_tokens, -match.attention_tokens, _name(match)

"""The index in memory: which node holds which part of which prompt.

Holdings are numbered: a node that registers with a new epoch gets new numbers, so that everything it held before is
void at once, whatever its size; `sweep` reclaims the memory later. Nothing here waits, logs or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prfaas.cachepool.layout import Layout
from prfaas.errors import IndexRefusal
from prfaas.events import POOL_TIERS, Tier
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.chain import Chain, chain_of
from prfaas.index.exact_table import ExactTable
from prfaas.index.matching import Evidence, Family, Kinds
from prfaas.index.query import Answer, Query
from prfaas.index.run_table import RunTable, bitmaps
from prfaas.index.segments import (
    CELL_BLOCKS,
    TAIL_BYTES,
    Announcement,
    Checkpoint,
    Digest,
    Holding,
    Segment,
    digest_of_hash,
)
from prfaas.types import AgentName, BlockHash, ClusterName


@dataclass(eq=False)
class _Part:
    """What one holder number stands for."""

    node: _Node
    holding: Holding
    family: Family
    place: int  # of its bits, in what is found of its family
    runs: RunTable
    exact: ExactTable
    digest: Digest = field(default_factory=Digest)


@dataclass(eq=False)
class _Node:
    name: AgentName
    cluster: ClusterName
    epoch: int
    layouts: dict[bytes, Layout]
    families: dict[bytes, Family] = field(default_factory=dict)  # by layout fingerprint
    parts: dict[Holding, int] = field(default_factory=dict)
    live: bool = True


class Index:
    """Everything that the nodes of all clusters have announced."""

    def __init__(self) -> None:
        self._nodes: dict[AgentName, _Node] = {}
        self._parts: list[_Part | None] = []
        self._runs: dict[tuple[str, int], RunTable] = {}
        self._exact: dict[str, ExactTable] = {}
        self._kinds = Kinds()
        self._sweep: Iterator[int] | None = None

    # -- nodes

    def register(self, name: AgentName, *, cluster: ClusterName, epoch: int, layouts: Sequence[Layout]) -> bool:
        """Make a node known; True when what it held before is void (a new epoch, or other layouts than before).

        Raises:
            IndexRefusal: `epoch` is older than the known one.
        """
        by_fingerprint = {layout.fingerprint: layout for layout in layouts}
        known = self._nodes.get(name)
        if known and epoch < known.epoch:
            raise IndexRefusal("stale_epoch", f"{name} registers epoch {epoch}; epoch {known.epoch} is known")
        if known and (known.epoch, known.cluster) == (epoch, cluster) and known.layouts.keys() <= by_fingerprint.keys():
            self._add_layouts(known, by_fingerprint)
            return False
        if known:
            self.forget(name)
        node = self._nodes[name] = _Node(name, cluster, epoch, {})
        self._add_layouts(node, by_fingerprint)
        return True

    def _add_layouts(self, node: _Node, layouts: dict[bytes, Layout]) -> None:
        node.layouts.update(layouts)
        for fingerprint, layout in layouts.items():
            self._exact.setdefault(layout.model, ExactTable())
            kind = self._kinds.of(layout, node.cluster)
            known = (family for family in node.families.values() if family.kind == kind)
            node.families[fingerprint] = next(known, None) or Family(node.name, kind)

    def forget(self, name: AgentName) -> None:
        """Void everything a node held, and the node itself. Constant time in the number of its blocks."""
        node = self._nodes.pop(name, None)
        for number in node.parts.values() if node else ():
            self._parts[number] = None

    def set_live(self, name: AgentName, live: bool) -> None:
        """Keep a node that is silent out of every answer, without forgetting what it holds."""
        if name in self._nodes:
            self._nodes[name].live = live

    def epoch(self, name: AgentName) -> int | None:
        node = self._nodes.get(name)
        return node.epoch if node else None

    def models(self) -> frozenset[str]:
        """Every model that some node has registered a layout of, or had until lately."""
        return frozenset(self._exact)

    # -- what they hold

    def reset(self, name: AgentName) -> None:
        """Void what a node held, because it is about to announce everything anew."""
        node = self._node(name)
        for number in node.parts.values():
            self._parts[number] = None
        node.parts = {}

    def apply(self, name: AgentName, announcements: Iterable[Announcement]) -> None:
        """Note what a node stored and removed. Announcing twice changes nothing.

        Raises:
            IndexRefusal: the node or layout is unknown, or an announcement contradicts its layout; those before it are
            applied.
        """
        node = self._node(name)
        for announcement in announcements:
            part, number = self._part(node, announcement.holding)
            if isinstance(announcement, Segment):
                self._apply_segment(part, number, announcement)
            else:
                self._apply_checkpoint(part, number, announcement)

    def _node(self, name: AgentName) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        return node

    def _part(self, node: _Node, holding: Holding) -> tuple[_Part, int]:
        number = node.parts.get(holding)
        if number is not None:
            part = self._parts[number]
            assert part is not None, "a node's parts are alive as long as it names them"
            return part, number
        layout = node.layouts.get(holding.layout)
        if layout is None or not 0 <= holding.group < len(layout.groups):
            raise IndexRefusal(
                "unknown_layout", f"{node.name} has not registered layout {holding.layout.hex()} with that group"
            )
        group = layout.groups[holding.group]
        size = 0 if group.kind == "linear_state" else group.block_tokens
        runs = self._runs.setdefault((layout.model, size), RunTable())
        family = node.families[holding.layout]
        place = family.kind.place(holding.group, layout.shard.rank)
        part = _Part(node, holding, family, place, runs, self._exact[layout.model])
        number = node.parts[holding] = len(self._parts)
        self._parts.append(part)
        return part, number

    def _apply_segment(self, part: _Part, number: int, segment: Segment) -> None:
        _check_segment(part, segment)
        if segment.stored:
            added = part.runs.store(number, head=segment.head, tails=segment.tails, bitmap=segment.bitmap)
            part.digest = part.digest.plus(added)
        else:
            gone = part.runs.remove(number, head=segment.head, tails=segment.tails, bitmap=segment.bitmap)
            part.digest = part.digest.minus(gone)

    def _apply_checkpoint(self, part: _Part, number: int, its: Checkpoint) -> None:
        _check_checkpoint(part, its)
        digest = digest_of_hash(its.block_hash)
        if its.stored:
            if part.exact.store(number, block_hash=its.block_hash, anchor=its.anchor, num_tokens=its.num_tokens):
                part.digest = part.digest.plus(digest)
        elif part.exact.remove(number, its.block_hash):
            part.digest = part.digest.minus(digest)

    def digests(self, name: AgentName) -> dict[Holding, Digest]:
        """What a node holds as far as this index knows, holdings without anything left out."""
        node = self._node(name)
        digests = {holding: part.digest for holding, number in node.parts.items() if (part := self._parts[number])}
        return {holding: digest for holding, digest in digests.items() if digest != Digest()}

    # -- questions

    def match(self, query: Query, *, tiers: frozenset[Tier] = POOL_TIERS) -> Answer:
        """What every live node and cluster can serve of a prompt.

        Raises:
            IndexRefusal: nobody has registered the model, or the query's hashes are not of our making.
        """
        query.check()
        if query.model not in self._exact:
            raise IndexRefusal("unknown_model", f"no node has registered model {query.model!r}")
        evidence, units = Evidence(query.limit_tokens), chain_of(query.units, HASH_UNIT_TOKENS)
        seen = self._find_blocks(query, units, evidence, tiers=tiers)
        odd_lengths = self._find_exact(query, units, evidence, tiers=tiers, reach_tokens=seen)
        return evidence.answer(odd_lengths)

    def _find_blocks(self, query: Query, units: Chain, evidence: Evidence, *, tiers: frozenset[Tier]) -> int:
        """Collect held blocks; returns how many tokens the longest of them reach."""
        reach = 0
        for (model, block_tokens), table in self._runs.items():
            if model != query.model or not block_tokens:
                continue
            chain = units if block_tokens == HASH_UNIT_TOKENS else chain_of(query.units, block_tokens)
            for number, bits in bitmaps(table.pieces(chain)).items():
                part = self._parts[number]
                if part and part.node.live and part.holding.tier in tiers:
                    evidence.of(part.family).blocks[part.place] |= bits
                    reach = max(reach, bits.bit_length() * block_tokens)
        return reach

    def _find_exact(
        self, query: Query, units: Chain, evidence: Evidence, *, tiers: frozenset[Tier], reach_tokens: int
    ) -> list[int]:
        """Collect checkpoints; returns the lengths of those whose hash the query did not state."""
        table = self._exact[query.model]
        if not len(table):
            return []
        sizes = [size for model, size in self._runs if model == query.model and size]
        reach = min(reach_tokens + max(sizes), query.limit_tokens) if sizes else query.limit_tokens
        num_units = min(reach // HASH_UNIT_TOKENS, len(query.units) // HASH_BYTES)
        stated = [(length, its) for length, its in query.checkpoints if length <= query.limit_tokens]
        evidence.ends, bitmaps = table.held(units, num_units, stated=stated)
        for number, bits in bitmaps.items():
            part = self._parts[number]
            if part and part.node.live and part.holding.tier in tiers:
                evidence.of(part.family).exact[part.place] |= bits
        known = {length for length, _ in query.checkpoints}
        return [
            length
            for length in table.odd_lengths(units, num_units)
            if length not in known and length <= query.limit_tokens
        ]

    # -- the whole of it

    def announcements(self, is_wanted: Callable[[AgentName], bool]) -> Iterator[tuple[AgentName, Announcement]]:
        """What these nodes hold, cell by cell; changes made meanwhile may or may not be seen."""
        for table in list(self._runs.values()):
            for head in table.heads():
                for path, holders in table.cell(head):
                    yield from self._segments(head, path, holders, is_wanted)
        for exact in list(self._exact.values()):
            for entry in exact:
                for number in list(entry.holders):
                    part = self._parts[number]
                    if part and is_wanted(part.node.name):
                        where = part.holding
                        yield part.node.name, Checkpoint(where, entry.block_hash, entry.anchor, entry.num_tokens, True)

    def _segments(
        self, head: BlockHash, path: bytes, holders: list[tuple[int, int]], is_wanted: Callable[[AgentName], bool]
    ) -> Iterator[tuple[AgentName, Segment]]:
        for number, bits in holders:
            part = self._parts[number]
            if part and is_wanted(part.node.name):
                tails = path[: bits.bit_length() * TAIL_BYTES]
                yield part.node.name, Segment(part.holding, head, tails, bits, stored=True)

    def sweep(self, num_cells: int) -> int:
        """Reclaim memory of void holdings in the next `num_cells` cells, or as many times 64 checkpoints; returns how many
        runs and checkpoints went."""
        dropped = 0
        for _ in range(num_cells):
            if self._sweep is None:
                self._sweep = self._sweep_all()
            step = next(self._sweep, None)
            if step is None:
                self._sweep = None
                break
            dropped += step
        return dropped

    def _sweep_all(self) -> Iterator[int]:
        for table in list(self._runs.values()):
            for head in table.heads():
                yield table.sweep(head, self._is_alive)
        for exact in list(self._exact.values()):
            yield from exact.sweep(self._is_alive)
        self._forget_unused()

    def _forget_unused(self) -> None:
        """What was there for nodes that are gone, and has no other."""
        nodes = self._nodes.values()
        models = {layout.model for node in nodes for layout in node.layouts.values()}
        self._exact = {model: table for model, table in self._exact.items() if model in models}
        self._runs = {key: table for key, table in self._runs.items() if key[0] in models}
        self._kinds.keep({family.kind for node in nodes for family in node.families.values()})

    def _is_alive(self, number: int) -> bool:
        return self._parts[number] is not None

    def num_runs(self) -> int:
        return sum(len(table) for table in self._runs.values())

    def num_blocks(self) -> int:
        """Blocks and checkpoints over all live holdings; one that two nodes hold counts twice."""
        return sum(part.digest.num_blocks for part in self._parts if part)


def _check_segment(part: _Part, segment: Segment) -> None:
    shape = part.family.kind.rules.shapes[part.holding.group]
    if shape.kind == "linear_state":
        raise IndexRefusal("wrong_block_size", f"{part.node.name} announces blocks of a linear-state group")
    length, remainder = divmod(len(segment.tails), TAIL_BYTES)
    if remainder or not 0 < length <= CELL_BLOCKS or segment.bitmap >> length or segment.bitmap < 0:
        raise IndexRefusal(
            "malformed", f"a segment has 1 to {CELL_BLOCKS} blocks of {TAIL_BYTES} bytes, and bits for those"
        )
    if len(segment.head) != HASH_BYTES or not segment.head.startswith(segment.tails[:TAIL_BYTES]):
        raise IndexRefusal("alien_hash", "a segment's head is the hash of its first block")


def _check_checkpoint(part: _Part, its: Checkpoint) -> None:
    shape = part.family.kind.rules.shapes[part.holding.group]
    if shape.kind != "linear_state" and its.num_tokens % shape.block_tokens == 0:
        raise IndexRefusal(
            "wrong_block_size", f"a partial block of {its.num_tokens} tokens in blocks of {shape.block_tokens}"
        )
    if its.num_tokens <= 0 or its.num_tokens >= 1 << 32:
        raise IndexRefusal("malformed", f"a checkpoint of {its.num_tokens} tokens")
    if len(its.block_hash) != HASH_BYTES or len(its.anchor) != HASH_BYTES:
        raise IndexRefusal("alien_hash", f"a hash has {HASH_BYTES} bytes")
    if shape.kind == "linear_state" and (its.num_tokens % HASH_UNIT_TOKENS == 0) != (its.anchor == its.block_hash):
        raise IndexRefusal("alien_hash", f"the state at {its.num_tokens} tokens and its anchor contradict each other")

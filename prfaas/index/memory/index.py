"""One part of a node's pool in the index: what of it is stored and taken back, and what contradicts its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.memory.exact_table import ExactTable
from prfaas.index.memory.matching import EngineShapes, HeldBits, MatchEvidence, NodeEngine
from prfaas.index.memory.run_table import RunTable, bitmaps
from prfaas.index.query import Chain, MatchResult, Query, chain_of
from prfaas.index.segments import (
    CELL_BLOCKS,
    TAIL_BYTES,
    Announcement,
    Checkpoint,
    Digest,
    Holding,
    Segment,
    digest_of_hash,
    grid_tokens,
)
from prfaas.kv.layout import Layout
from prfaas.pool_events import POOL_TIERS, Tier
from prfaas.types import AgentName, BlockHash, ClusterName


@dataclass(eq=False)
class Holder:
    """What one holder number stands for."""

    number: int
    holding: Holding
    family: NodeEngine
    place: int  # of its bits, in what is found of its family
    is_state: bool
    block_tokens: int  # of its blocks; of a state, of those at whose ends it is marked, or 0
    runs: RunTable
    exact: ExactTable
    digest: Digest = field(default_factory=Digest)


def note_segment(bitmaps: Sequence[tuple[Holder, int]], segment: Segment) -> None:
    """Store or remove blocks, and the states beside them: by part, which of the path.

    Raises:
        IndexRefusal: it contradicts a part's layout; nothing of it is noted.
    """
    _check_segment(bitmaps, segment)
    for part, bitmap in bitmaps:
        if segment.stored:
            store = part.runs.store_marks if part.is_state else part.runs.store
            added = store(part.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            part.digest = part.digest.plus(added)
        else:
            gone = part.runs.remove(part.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            part.digest = part.digest.minus(gone)


def note_checkpoint(part: Holder, its: Checkpoint) -> None:
    """Store or remove what is valid at one exact length.

    Raises:
        IndexRefusal: it contradicts its part's layout.
    """
    _check_checkpoint(part, its)
    digest = digest_of_hash(its.block_hash)
    if its.stored:
        if _store(part, its):
            part.digest = part.digest.plus(digest)
    elif _remove(part, its):
        part.digest = part.digest.minus(digest)


def _store(part: Holder, its: Checkpoint) -> bool:
    """Note a checkpoint, beside the block that it ends with where that is known; False when it was noted before."""
    if its.head is not None and _is_marked(part, its):
        if part.exact.holds(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens):
            return False
        tail, offset = its.block_hash[:TAIL_BYTES], _offset(part, its)
        is_new = part.runs.mark(part.number, head=its.head, offset=offset, tail=tail)
        if is_new is not None:
            return is_new
    anchor = its.anchor if part.is_state else None
    return part.exact.store(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens, anchor=anchor)


def _remove(part: Holder, its: Checkpoint) -> bool:
    """Take a checkpoint back; False when it was not noted."""
    if part.exact.remove(part.number, block_hash=its.block_hash, num_tokens=its.num_tokens):
        return True
    if its.head is None or not _is_marked(part, its):
        return False
    tail, offset = its.block_hash[:TAIL_BYTES], _offset(part, its)
    return bool(part.runs.unmark(part.number, head=its.head, offset=offset, tail=tail))


def _is_marked(part: Holder, its: Checkpoint) -> bool:
    """Whether it is a state that ends with a block, beside which it can be noted."""
    return part.is_state and part.block_tokens > 0 and not its.num_tokens % part.block_tokens


def _offset(part: Holder, its: Checkpoint) -> int:
    """Of the block that a state ends with, in its cell."""
    return (its.num_tokens // part.block_tokens - 1) % CELL_BLOCKS


def _check_segment(bitmaps: Sequence[tuple[Holder, int]], segment: Segment) -> None:
    part, _ = bitmaps[0]
    if not part.block_tokens or not all(its.is_state for its, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{part.family.node} announces blocks of a group that has none")
    if any(its.runs is not part.runs for its, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{part.family.node} announces states beside blocks of another size")
    length, remainder = divmod(len(segment.tails), TAIL_BYTES)
    is_odd = any(bitmap >> length or bitmap < 0 for _, bitmap in bitmaps)
    if remainder or not 0 < length <= CELL_BLOCKS or is_odd:
        raise IndexRefusal(
            "malformed", f"a segment has 1 to {CELL_BLOCKS} blocks of {TAIL_BYTES} bytes, and bits for those"
        )
    if len(segment.head) != HASH_BYTES or not segment.head.startswith(segment.tails[:TAIL_BYTES]):
        raise IndexRefusal("alien_hash", "a segment's head is the hash of its first block")


def _check_checkpoint(part: Holder, its: Checkpoint) -> None:
    shape = part.family.kind.rules.groups[part.holding.group]
    if not shape.is_state and its.num_tokens % shape.block_tokens == 0:
        raise IndexRefusal(
            "wrong_block_size", f"a partial block of {its.num_tokens} tokens in blocks of {shape.block_tokens}"
        )
    if its.num_tokens <= 0 or its.num_tokens >= 1 << 32:
        raise IndexRefusal("malformed", f"a checkpoint of {its.num_tokens} tokens")
    hashes = (its.block_hash, its.anchor, *((its.head,) if its.head is not None else ()))
    if any(len(each) != HASH_BYTES for each in hashes):
        raise IndexRefusal("alien_hash", f"a hash has {HASH_BYTES} bytes")
    if shape.is_state and (its.num_tokens % HASH_UNIT_TOKENS == 0) != (its.anchor == its.block_hash):
        raise IndexRefusal("alien_hash", f"the state at {its.num_tokens} tokens and its anchor contradict each other")


_Answering = dict[
    int, tuple[NodeEngine, int, int, bool]
]  # holder → family, places of blocks and checkpoints, of a state


@dataclass(eq=False)
class _Node:
    name: AgentName
    cluster: ClusterName
    epoch: int
    layouts: dict[bytes, Layout]
    families: dict[bytes, NodeEngine] = field(default_factory=dict)  # by layout fingerprint
    parts: dict[Holding, int] = field(default_factory=dict)
    live: bool = True


class Index:
    """Everything that the nodes of all clusters have announced."""

    def __init__(self) -> None:
        self._nodes: dict[AgentName, _Node] = {}
        self._parts: list[Holder | None] = []
        self._runs: dict[tuple[str, int], RunTable] = {}
        self._answering: dict[frozenset[Tier], _Answering] = {}  # what `_answering_parts` has found
        self._exact: dict[str, ExactTable] = {}
        self._kinds = EngineShapes()
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
            node.families[fingerprint] = next(known, None) or NodeEngine(node.name, kind)

    def forget(self, name: AgentName) -> None:
        """Void everything a node held, and the node itself. Constant time in the number of its blocks."""
        node = self._nodes.pop(name, None)
        if node:
            self._void_parts(node)

    def _void_parts(self, node: _Node) -> None:
        for number in node.parts.values():
            self._parts[number] = None
        node.parts = {}
        self._answering.clear()

    def set_live(self, name: AgentName, live: bool) -> None:
        """Keep a node that is silent out of every answer, without forgetting what it holds."""
        node = self._nodes.get(name)
        if node and node.live != live:
            node.live = live
            self._answering.clear()

    def epoch(self, name: AgentName) -> int | None:
        node = self._nodes.get(name)
        return node.epoch if node else None

    def models(self) -> frozenset[str]:
        """Every model that some node has registered a layout of, or had until lately."""
        return frozenset(self._exact)

    # -- what they hold

    def reset(self, name: AgentName) -> None:
        """Void what a node held, because it is about to announce everything anew."""
        self._void_parts(self._node(name))

    def apply(self, name: AgentName, announcements: Iterable[Announcement]) -> None:
        """Note what a node stored and removed. Announcing twice changes nothing.

        Raises:
            IndexRefusal: the node or layout is unknown, or an announcement contradicts its layout; those before it are
            applied.
        """
        node = self._node(name)
        for announcement in announcements:
            part = self._part(node, announcement.holding)
            if isinstance(announcement, Segment):
                states = [(self._part(node, holding), bitmap) for holding, bitmap in announcement.states]
                note_segment([(part, announcement.bitmap), *states], announcement)
            else:
                note_checkpoint(part, announcement)

    def _node(self, name: AgentName) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        return node

    def _part(self, node: _Node, holding: Holding) -> Holder:
        number = node.parts.get(holding)
        if number is not None:
            part = self._parts[number]
            assert part is not None, "a node's parts are alive as long as it names them"
            return part
        layout = node.layouts.get(holding.layout)
        if layout is None or not 0 <= holding.group < len(layout.groups):
            raise IndexRefusal(
                "unknown_layout", f"{node.name} has not registered layout {holding.layout.hex()} with that group"
            )
        group = layout.groups[holding.group]
        is_state = group.is_state
        size = grid_tokens(layout) if is_state else group.block_tokens
        runs = self._runs.setdefault((layout.model, size), RunTable())
        family = node.families[holding.layout]
        place = family.kind.place(holding.group, layout.shard.rank)
        number = node.parts[holding] = len(self._parts)
        part = Holder(number, holding, family, place, is_state, size, runs, self._exact[layout.model])
        self._parts.append(part)
        self._answering.clear()
        return part

    def digests(self, name: AgentName) -> dict[Holding, Digest]:
        """What a node holds as far as this index knows, holdings without anything left out."""
        node = self._node(name)
        digests = {holding: part.digest for holding, number in node.parts.items() if (part := self._parts[number])}
        return {holding: digest for holding, digest in digests.items() if digest != Digest()}

    # -- questions

    def match(self, query: Query, *, tiers: frozenset[Tier] = POOL_TIERS) -> MatchResult:
        """What every live node and cluster can serve of a prompt, and all of them together where that is asked for.

        Raises:
            IndexRefusal: nobody has registered the model, or the query's hashes are not of our making.
        """
        query.check()
        if query.model not in self._exact:
            raise IndexRefusal("unknown_model", f"no node has registered model {query.model!r}")
        evidence, units = MatchEvidence(query.limit_tokens), chain_of(query.units, HASH_UNIT_TOKENS)
        parts = self._answering_parts(tiers)
        reach, marks = self._find_blocks(query, units, evidence, parts=parts)
        odd_lengths = self._find_exact(query, units, evidence, parts=parts, reach_tokens=reach, marks=marks)
        return evidence.answer(odd_lengths, with_world=query.with_world)

    def _answering_parts(self, tiers: frozenset[Tier]) -> _Answering:
        """The family and place of every holding of live nodes in `tiers`, as they are until a node or holding comes or
        goes."""
        found = self._answering.get(tiers)
        if found is None:
            found = self._answering[tiers] = {
                number: (part.family, part.place, part.place + part.family.kind.num_places, part.is_state)
                for node in self._nodes.values()
                if node.live
                for number in node.parts.values()
                if (part := self._parts[number]) and part.holding.tier in tiers
            }
        return found

    def _find_blocks(
        self, query: Query, units: Chain, evidence: MatchEvidence, *, parts: _Answering
    ) -> tuple[int, dict[int, list[HeldBits]]]:
        """Collect held blocks; returns how many tokens the longest of them reach, and by a block's tokens the states that
        are marked at such blocks' ends."""
        reach, marks = 0, dict[int, list[HeldBits]]()
        for (model, block_tokens), table in self._runs.items():
            if model != query.model or not block_tokens:
                continue
            chain = units if block_tokens == HASH_UNIT_TOKENS else chain_of(query.units, block_tokens)
            for number, bits in bitmaps(table.pieces(chain)).items():
                part = parts.get(number)
                if part is None or not bits:
                    continue
                family, place, place_of_exact, is_state = part
                if is_state:
                    marks.setdefault(block_tokens, []).append((family, place_of_exact, bits))
                else:
                    evidence.add(family, place, bits)
                    reach = max(reach, bits.bit_length() * block_tokens)
        return reach, marks

    def _find_exact(
        self,
        query: Query,
        units: Chain,
        evidence: MatchEvidence,
        *,
        parts: _Answering,
        reach_tokens: int,
        marks: Mapping[int, Sequence[HeldBits]],
    ) -> list[int]:
        """Collect checkpoints; returns the lengths of those whose hash the query did not state."""
        table = self._exact[query.model]
        if not len(table):
            evidence.add_exact((), (), marks)
            return []
        sizes = [size for model, size in self._runs if model == query.model and size]
        reach = min(reach_tokens + max(sizes), query.limit_tokens) if sizes else query.limit_tokens
        num_units = min(reach // HASH_UNIT_TOKENS, len(query.units) // HASH_BYTES)
        stated = [(length, its) for length, its in query.checkpoints if length <= query.limit_tokens]
        lengths, found = table.held(units, num_units, stated=stated)
        entries = [(part[0], part[2], bits) for number, bits in found.items() if (part := parts.get(number))]
        evidence.add_exact(lengths if entries else (), entries, marks)
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
                    if part and is_wanted(part.family.node):
                        where = part.holding
                        yield (
                            part.family.node,
                            Checkpoint(where, entry.block_hash, entry.anchor, entry.num_tokens, True),
                        )

    def _segments(
        self, head: BlockHash, path: bytes, holders: list[tuple[int, int]], is_wanted: Callable[[AgentName], bool]
    ) -> Iterator[tuple[AgentName, Segment]]:
        """A path's blocks by holder, the states of each node with its first."""
        wanted = [
            (part, bits)
            for number, bits in holders
            if bits and (part := self._parts[number]) and is_wanted(part.family.node)
        ]
        states: dict[AgentName, list[tuple[Holding, int]]] = {}
        for part, bits in wanted:
            if part.is_state:
                states.setdefault(part.family.node, []).append((part.holding, bits))
        for part, bits in wanted:
            if not part.is_state:
                name = part.family.node
                yield name, _segment(part.holding, head, path, bits, states.pop(name, ()))
        for name, ((holding, bits), *others) in states.items():
            yield name, _segment(holding, head, path, bits, others)

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


def _segment(
    holding: Holding, head: BlockHash, path: bytes, bitmap: int, states: Sequence[tuple[Holding, int]]
) -> Segment:
    """As much of the path as they speak of."""
    num_blocks = max(bits.bit_length() for bits in (bitmap, *(bits for _, bits in states)))
    return Segment(holding, head, path[: num_blocks * TAIL_BYTES], bitmap, True, tuple(states))

"""The index in memory: everything that the nodes of all clusters have announced."""

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
    begins_anywhere,
    digest_of_hash,
    grid_tokens,
)
from prfaas.kv.layout import Layout
from prfaas.pool_events import Tier
from prfaas.types import AgentName, BlockHash, ClusterName


@dataclass(eq=False)
class Holder:
    """One holding of one node, which the tables know by its number."""

    number: int
    holding: Holding
    engine: NodeEngine
    place: int  # Of its bits in the match evidence of its engine.
    is_state: bool
    block_tokens: int  # For a state, of the blocks at whose ends it is marked, or 0.
    runs: RunTable
    exact: ExactTable
    digest: Digest = field(default_factory=Digest)

    def apply_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store or remove what is valid at one exact length.

        Raises:
            IndexRefusal: the checkpoint contradicts the layout.
        """
        self._check(checkpoint)
        digest = digest_of_hash(checkpoint.block_hash)
        if checkpoint.stored:
            if self._store(checkpoint):
                self.digest = self.digest.plus(digest)
        elif self._remove(checkpoint):
            self.digest = self.digest.minus(digest)

    def _store(self, checkpoint: Checkpoint) -> bool:
        """Store a checkpoint, together with the block at its end if that is known. Return whether it is new."""
        block_hash, num_tokens = checkpoint.block_hash, checkpoint.num_tokens
        if checkpoint.head is not None and self._is_markable(checkpoint):
            if self.exact.holds(self.number, block_hash=block_hash, num_tokens=num_tokens):
                return False
            tail, offset = block_hash[:TAIL_BYTES], self._offset(checkpoint)
            is_new = self.runs.mark(self.number, head=checkpoint.head, offset=offset, tail=tail)
            if is_new is not None:
                return is_new
        anchor = checkpoint.anchor if self.is_state else None
        return self.exact.store(self.number, block_hash=block_hash, num_tokens=num_tokens, anchor=anchor)

    def _remove(self, checkpoint: Checkpoint) -> bool:
        """Remove a checkpoint, and return whether it was there."""
        block_hash = checkpoint.block_hash
        if self.exact.remove(self.number, block_hash=block_hash, num_tokens=checkpoint.num_tokens):
            return True
        if checkpoint.head is None or not self._is_markable(checkpoint):
            return False
        tail, offset = block_hash[:TAIL_BYTES], self._offset(checkpoint)
        return bool(self.runs.unmark(self.number, head=checkpoint.head, offset=offset, tail=tail))

    def _is_markable(self, checkpoint: Checkpoint) -> bool:
        """Return whether it is a state that ends with a known block, with which it is stored."""
        return self.is_state and self.block_tokens > 0 and not checkpoint.num_tokens % self.block_tokens

    def _offset(self, checkpoint: Checkpoint) -> int:
        """Return the offset in its cell of the block with which a state ends."""
        return (checkpoint.num_tokens // self.block_tokens - 1) % CELL_BLOCKS

    def _check(self, checkpoint: Checkpoint) -> None:
        num_tokens, anchor = checkpoint.num_tokens, checkpoint.anchor
        if not self.is_state and num_tokens % self.block_tokens == 0:
            raise IndexRefusal(
                "wrong_block_size", f"a partial block of {num_tokens} tokens in blocks of {self.block_tokens}"
            )
        if num_tokens <= 0 or num_tokens >= 1 << 32:
            raise IndexRefusal("malformed", f"a checkpoint of {num_tokens} tokens")
        hashes = (checkpoint.block_hash, anchor, *((checkpoint.head,) if checkpoint.head is not None else ()))
        if any(len(each) != HASH_BYTES for each in hashes):
            raise IndexRefusal("alien_hash", f"a hash has {HASH_BYTES} bytes")
        if self.is_state and (num_tokens % HASH_UNIT_TOKENS == 0) != (anchor == checkpoint.block_hash):
            raise IndexRefusal("alien_hash", f"the state at {num_tokens} tokens and its anchor contradict each other")


def apply_segment(bitmaps: Sequence[tuple[Holder, int]], segment: Segment) -> None:
    """Store or remove blocks, and the states that end with them: per holder a bitmap over the path.

    Raises:
        IndexRefusal: the segment contradicts a holder's layout; nothing of it is applied.
    """
    _check_segment(bitmaps, segment)
    for holder, bitmap in bitmaps:
        if segment.stored:
            store = holder.runs.store_marks if holder.is_state else holder.runs.store
            added = store(holder.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            holder.digest = holder.digest.plus(added)
        else:
            gone = holder.runs.remove(holder.number, head=segment.head, tails=segment.tails, bitmap=bitmap)
            holder.digest = holder.digest.minus(gone)


def _check_segment(bitmaps: Sequence[tuple[Holder, int]], segment: Segment) -> None:
    first, _ = bitmaps[0]
    if not first.block_tokens or not all(holder.is_state for holder, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{first.engine.node} announces blocks of a group without token blocks")
    if any(holder.runs is not first.runs for holder, _ in bitmaps[1:]):
        raise IndexRefusal("wrong_block_size", f"{first.engine.node} announces states with blocks of another size")
    length, remainder = divmod(len(segment.tails), TAIL_BYTES)
    is_outside = any(bitmap >> length or bitmap < 0 for _, bitmap in bitmaps)
    if remainder or not 0 < length <= CELL_BLOCKS or is_outside:
        raise IndexRefusal(
            "malformed", f"a segment has 1 to {CELL_BLOCKS} blocks of {TAIL_BYTES} bytes, and no bits beyond them"
        )
    if len(segment.head) != HASH_BYTES or not segment.head.startswith(segment.tails[:TAIL_BYTES]):
        raise IndexRefusal("alien_hash", "a segment's head is the hash of its first block")


@dataclass(eq=False)
class _IndexedNode:
    name: AgentName
    cluster: ClusterName
    epoch: int
    layouts: dict[bytes, Layout]
    engines: dict[bytes, NodeEngine] = field(default_factory=dict)  # By layout fingerprint.
    holders: dict[Holding, Holder] = field(default_factory=dict)
    live: bool = True


# By holder number: its engine, the places of its blocks and checkpoints, and whether it holds states.
_Answering = dict[int, tuple[NodeEngine, int, int, bool]]


class Index:
    """Everything that the nodes of all clusters have announced."""

    def __init__(self) -> None:
        self._nodes: dict[AgentName, _IndexedNode] = {}
        self._holders: list[Holder | None] = []  # By number; None once it is void.
        self._void: list[int] = []  # Numbers of void holders that a sweep has yet to find.
        self._free: list[int] = []  # Numbers that no table has any more.
        self._runs: dict[tuple[str, int], RunTable] = {}  # By model and block size.
        self._answering: _Answering | None = None  # Cache of `_answering_holders`.
        self._exact: dict[str, ExactTable] = {}  # By model.
        self._shapes = EngineShapes()
        self._sweep: Iterator[int] | None = None
        self._is_sweep_due = False

    # Nodes

    def register(self, name: AgentName, *, cluster: ClusterName, epoch: int, layouts: Sequence[Layout]) -> bool:
        """Add a node, and return whether its earlier holdings are void (a new epoch, or other layouts than before)."""
        by_fingerprint = {layout.fingerprint: layout for layout in layouts}
        known = self._nodes.get(name)
        if known and (known.epoch, known.cluster) == (epoch, cluster) and known.layouts.keys() <= by_fingerprint.keys():
            self._add_layouts(known, by_fingerprint)
            return False
        if known:
            self.forget(name)
        node = self._nodes[name] = _IndexedNode(name, cluster, epoch, {})
        self._add_layouts(node, by_fingerprint)
        return True

    def _add_layouts(self, node: _IndexedNode, layouts: dict[bytes, Layout]) -> None:
        node.layouts.update(layouts)
        for fingerprint, layout in layouts.items():
            self._exact.setdefault(layout.model, ExactTable())
            shape = self._shapes.shape_of(layout, node.cluster)
            known = (engine for engine in node.engines.values() if engine.shape == shape)
            node.engines[fingerprint] = next(known, None) or NodeEngine(node.name, shape)

    def forget(self, name: AgentName) -> None:
        """Void a node and everything it held, in constant time per holding."""
        node = self._nodes.pop(name, None)
        if node:
            self._void_holders(node)

    def _void_holders(self, node: _IndexedNode) -> None:
        for holder in node.holders.values():
            self._holders[holder.number] = None
            self._void.append(holder.number)
        self._is_sweep_due = True
        node.holders = {}
        self._answering = None

    def set_live(self, name: AgentName, live: bool) -> None:
        """Leave a silent node out of every result without forgetting its holdings, or take it in again."""
        node = self._nodes.get(name)
        if node and node.live != live:
            node.live = live
            self._answering = None

    def models(self) -> frozenset[str]:
        """Return every model of which a node has, or lately had, a layout."""
        return frozenset(self._exact)

    # Announcements

    def reset(self, name: AgentName) -> None:
        """Void a node's holdings, because the node is about to announce everything again."""
        self._void_holders(self._node(name))

    def apply(self, name: AgentName, announcements: Iterable[Announcement]) -> None:
        """Apply a node's announcements. Applying one twice changes nothing.

        Raises:
            IndexRefusal: the node or layout is unknown, or an announcement contradicts its layout; those before it are
            applied.
        """
        node = self._node(name)
        for announcement in announcements:
            holder = self._holder(node, announcement.holding)
            if isinstance(announcement, Segment):
                states = [(self._holder(node, holding), bitmap) for holding, bitmap in announcement.states]
                apply_segment([(holder, announcement.bitmap), *states], announcement)
            else:
                holder.apply_checkpoint(announcement)

    def _node(self, name: AgentName) -> _IndexedNode:
        node = self._nodes.get(name)
        if node is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        return node

    def _holder(self, node: _IndexedNode, holding: Holding) -> Holder:
        known = node.holders.get(holding)
        if known is not None:
            return known
        layout = node.layouts.get(holding.layout)
        if layout is None or not 0 <= holding.group < len(layout.groups):
            raise IndexRefusal(
                "unknown_layout", f"{node.name} has not registered layout {holding.layout.hex()} with that group"
            )
        group = layout.groups[holding.group]
        size = grid_tokens(layout) if group.is_state else group.block_tokens
        runs = self._runs.setdefault((layout.model, size), RunTable())
        runs.begin_anywhere = runs.begin_anywhere or begins_anywhere(layout, holding.group)
        engine = node.engines[holding.layout]
        place = engine.shape.place(holding.group, layout.shard.rank)
        exact = self._exact[layout.model]
        if not self._free:
            self._free.append(len(self._holders))
            self._holders.append(None)
        number = self._free.pop()
        holder = Holder(number, holding, engine, place, group.is_state, size, runs, exact)
        node.holders[holding] = self._holders[number] = holder
        self._answering = None
        return holder

    def digests(self, name: AgentName) -> dict[Holding, Digest]:
        """Return the digests of a node's holdings as this index knows them, without empty ones."""
        holders = self._node(name).holders
        return {holding: holder.digest for holding, holder in holders.items() if holder.digest != Digest()}

    # Queries

    def match(self, query: Query, *, tier: Tier | None = None) -> MatchResult:
        """Return the part of a prompt that each live node can serve, from all tiers or from one.

        Raises:
            IndexRefusal: no node has registered the model, or the query's hashes are malformed.
        """
        query.check()
        if query.model not in self._exact:
            raise IndexRefusal("unknown_model", f"no node has registered model {query.model!r}")
        evidence, units = MatchEvidence(query.limit_tokens), chain_of(query.units, HASH_UNIT_TOKENS)
        holders = self._answering_holders()
        if tier is not None:
            held = {holder.number for holder in self._holders if holder and holder.holding.tier == tier}
            holders = {number: holder for number, holder in holders.items() if number in held}
        reach, marks = self._find_blocks(query, units, evidence, holders=holders)
        odd_lengths = self._find_exact(query, units, evidence, holders=holders, reach_tokens=reach, marks=marks)
        return evidence.result(odd_lengths)

    def _answering_holders(self) -> _Answering:
        """Return every holder of live nodes, cached until a node or holding comes or goes."""
        if self._answering is None:
            self._answering = {
                holder.number: (
                    holder.engine,
                    holder.place,
                    holder.place + holder.engine.shape.num_places,
                    holder.is_state,
                )
                for node in self._nodes.values()
                if node.live
                for holder in node.holders.values()
            }
        return self._answering

    def _find_blocks(
        self, query: Query, units: Chain, evidence: MatchEvidence, *, holders: _Answering
    ) -> tuple[int, dict[int, list[HeldBits]]]:
        """Collect held blocks. Return how many tokens the longest reach, and by block size the marked states."""
        reach, marks = 0, dict[int, list[HeldBits]]()
        for (model, block_tokens), table in self._runs.items():
            if model != query.model or not block_tokens:
                continue
            chain = units if block_tokens == HASH_UNIT_TOKENS else chain_of(query.units, block_tokens)
            for number, bits in bitmaps(table.pieces(chain)).items():
                holder = holders.get(number)
                if holder is None or not bits:
                    continue
                engine, place, place_of_exact, is_state = holder
                if is_state:
                    marks.setdefault(block_tokens, []).append((engine, place_of_exact, bits))
                else:
                    evidence.add(engine, place, bits)
                    reach = max(reach, bits.bit_length() * block_tokens)
        return reach, marks

    def _find_exact(
        self,
        query: Query,
        units: Chain,
        evidence: MatchEvidence,
        *,
        holders: _Answering,
        reach_tokens: int,
        marks: Mapping[int, Sequence[HeldBits]],
    ) -> list[int]:
        """Collect checkpoints, and return the lengths of those whose hash the query did not state."""
        table = self._exact[query.model]
        if not len(table):
            evidence.add_exact((), (), marks)
            return []
        sizes = [size for model, size in self._runs if model == query.model and size]
        reach = min(reach_tokens + max(sizes), query.limit_tokens) if sizes else query.limit_tokens
        num_units = min(reach // HASH_UNIT_TOKENS, len(query.units) // HASH_BYTES)
        stated = [(length, block_hash) for length, block_hash in query.checkpoints if length <= query.limit_tokens]
        lengths, found = table.held(units, num_units, stated=stated)
        entries = [(known[0], known[2], bits) for number, bits in found.items() if (known := holders.get(number))]
        evidence.add_exact(lengths if entries else (), entries, marks)
        known_lengths = {length for length, _ in query.checkpoints}
        return [
            length
            for length in table.odd_lengths(units, num_units)
            if length not in known_lengths and length <= query.limit_tokens
        ]

    # Snapshots and memory

    def announcements(self, is_wanted: Callable[[AgentName], bool]) -> Iterator[tuple[AgentName, Announcement]]:
        """Yield the holdings of wanted nodes, cell by cell; changes made meanwhile may or may not be seen."""
        for table in list(self._runs.values()):
            for head, key in table.runs():
                path, holders = table.path(head, key)
                yield from self._segments(BlockHash(head), path, holders, is_wanted)
        for exact in list(self._exact.values()):
            for entry in exact:
                for number in list(entry.holders):
                    holder = self._holders[number]
                    if holder and is_wanted(holder.engine.node):
                        exactly = (entry.block_hash, entry.anchor, entry.num_tokens)
                        yield holder.engine.node, Checkpoint(holder.holding, *exactly, stored=True)

    def _segments(
        self, head: BlockHash, path: bytes, holders: list[tuple[int, int]], is_wanted: Callable[[AgentName], bool]
    ) -> Iterator[tuple[AgentName, Segment]]:
        """Yield a path's blocks by holder, each node's states with its first segment."""
        wanted = [
            (holder, bits)
            for number, bits in holders
            if bits and (holder := self._holders[number]) and is_wanted(holder.engine.node)
        ]
        states: dict[AgentName, list[tuple[Holding, int]]] = {}
        for holder, bits in wanted:
            if holder.is_state:
                states.setdefault(holder.engine.node, []).append((holder.holding, bits))
        for holder, bits in wanted:
            if not holder.is_state:
                name = holder.engine.node
                yield name, _segment(head, path, [(holder.holding, bits), *states.pop(name, ())])
        for name, bitmaps_of_states in states.items():
            yield name, _segment(head, path, bitmaps_of_states)

    def sweep(self, num_steps: int) -> int:
        """Reclaim memory of void holdings in the next `num_steps` runs, or as many times 64 checkpoints.

        Return how many runs and checkpoints went.
        """
        dropped = 0
        for _ in range(num_steps):
            if self._sweep is None:
                if not self._is_sweep_due:
                    break
                self._is_sweep_due, void, self._void = False, self._void, []
                self._sweep = self._sweep_all(void)
            step = next(self._sweep, None)
            if step is None:
                self._sweep = None
            else:
                dropped += step
        return dropped

    def _sweep_all(self, void: list[int]) -> Iterator[int]:
        for table in list(self._runs.values()):
            for head, key in table.runs():
                yield table.sweep(head, key, self._is_alive)
        for exact in list(self._exact.values()):
            yield from exact.sweep(self._is_alive)
        self._forget_unused()
        self._free += void

    def _forget_unused(self) -> None:
        """Forget the tables and shapes that no node uses any more."""
        nodes = self._nodes.values()
        models = {layout.model for node in nodes for layout in node.layouts.values()}
        self._exact = {model: table for model, table in self._exact.items() if model in models}
        self._runs = {key: table for key, table in self._runs.items() if key[0] in models}
        self._shapes.keep({engine.shape for node in nodes for engine in node.engines.values()})

    def _is_alive(self, number: int) -> bool:
        return self._holders[number] is not None

    def num_runs(self) -> int:
        return sum(len(table) for table in self._runs.values())

    def num_blocks(self) -> int:
        """Return the blocks and checkpoints of all live holdings; a block that two nodes hold counts twice."""
        return sum(holder.digest.num_blocks for holder in self._holders if holder)


def _segment(head: BlockHash, path: bytes, bitmaps: Sequence[tuple[Holding, int]]) -> Segment:
    """Return a segment as long as the bitmaps."""
    num_blocks = max(bits.bit_length() for _, bits in bitmaps)
    (holding, bits), *states = bitmaps
    return Segment(holding, head, path[: num_blocks * TAIL_BYTES], bits, True, tuple(states))

"""Layouts that this node knows: those of its engines, and unlike ones of peers' engines."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from prfaas.agent.transfer.grant_check import TransferRefused
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.kv import repack
from prfaas.kv.layout import Layout
from prfaas.transport.receiver.admission import FairQuota
from prfaas.types import AgentName

# Each foreign layout costs a file descriptor and a little memory.
MAX_FOREIGN_LAYOUTS = 256
# Bytes of unknown layouts that are read per period, over all peers: the agent does nothing else meanwhile.
# An engine of eight ranks and 130 layers describes 200 KB, once.
MAX_DESCRIBED_BYTES = 4 << 20
DESCRIBED_PERIOD_SECONDS = 4.0


class LayoutRegistry:
    """Layouts of one node. A *foreign* layout belongs to no engine here: its blocks are repacked and never shared."""

    def __init__(self, name: AgentName, pool: Pool, *, max_foreign: int = MAX_FOREIGN_LAYOUTS) -> None:
        self._name = name
        self._pool = pool
        self._max_foreign = max_foreign
        # Fingerprints, least recently used first.
        self._foreign: OrderedDict[bytes, None] = OrderedDict()
        self._described = FairQuota(MAX_DESCRIBED_BYTES)
        self._period_ends_at = 0.0  # monotonic seconds

    def expire(self, now: float) -> None:
        """Start a new period for peers' descriptions once it is due; `now` is monotonic seconds."""
        if now >= self._period_ends_at:
            self._described = FairQuota(MAX_DESCRIBED_BYTES)
            self._period_ends_at = now + DESCRIBED_PERIOD_SECONDS

    def add_native(self, layout: Layout) -> None:
        """Record that an engine here has this layout."""
        self._foreign.pop(layout.fingerprint, None)

    def native_arenas(self) -> list[Arena]:
        """Return the arenas of layouts that engines here have."""
        return [arena for arena in self._pool.arenas if arena.layout.fingerprint not in self._foreign]

    def has_foreign(self, layouts: Collection[Layout]) -> bool:
        """Return whether any of the layouts is foreign."""
        return any(layout.fingerprint in self._foreign for layout in layouts)

    def wants_description(self, peer: str, fingerprints: Collection[bytes], num_bytes: int) -> bool:
        """Return whether the layouts in an OPEN must be read: not all are known here.

        Raises:
            TransferRefused: Peers described too much recently.
        """
        if all(self._pool.arena_of(fingerprint) is not None for fingerprint in fingerprints):
            return False
        if not self._described.has_room(peer, num_bytes):
            raise TransferRefused("no_memory", "peers have described too many layouts recently; try again later")
        self._described.change(peer, num_bytes)
        return True

    def conflict(self, peer_layout: Layout) -> str | None:
        """Return why no engine of the same model here can read blocks of `peer_layout`, even repacked, or None."""
        reader = self._unlike_reader(peer_layout)
        found = reader and repack.obstacle(peer_layout, reader)
        if not reader or not found:
            return None
        here, there = reader.shard.size, peer_layout.shard.size
        sizes = "" if here == there else f"tensor-parallel size: {here} here, {there} there; "
        return f"{self._name} holds this model with another layout: {sizes}{found}"

    def _unlike_reader(self, peer_layout: Layout) -> Layout | None:
        """Return an engine's layout into which blocks of `peer_layout` must be repacked, or None.

        Of engines with the same tensor-parallel size it is that of the same rank, once this rank has attached.
        """
        own_layouts = self._of_model(peer_layout.model)
        if peer_layout in own_layouts:
            return None
        same_size = [layout for layout in own_layouts if layout.shard.size == peer_layout.shard.size]
        readers = [layout for layout in same_size if layout.shard == peer_layout.shard] if same_size else own_layouts
        return readers[0] if readers else None

    def _of_model(self, model: str) -> list[Layout]:
        return [arena.layout for arena in self.native_arenas() if arena.layout.model == model]

    def arenas(self, opened: OpenBody) -> tuple[Arena, ...]:
        """Return one arena for each rank of the sending engine.

        Raises:
            TransferRefused: The layouts are not the ranks of one engine, or no engine here can read their blocks.
        """
        if found := next((text for layout in opened.layouts if (text := self.conflict(layout))), None):
            raise TransferRefused("layout_mismatch", found)
        first = self._arena(opened, opened.fingerprints[0])
        if len(opened.fingerprints) != first.layout.shard.size:
            raise TransferRefused("no_layout", f"{len(opened.fingerprints)} of {first.layout.shard.size} ranks")
        arenas = tuple(self._arena(opened, fingerprint) for fingerprint in opened.fingerprints)
        for rank, layout in enumerate(arena.layout for arena in arenas):
            shard = replace(first.layout.shard, rank=rank)
            if (layout.model, layout.packing, layout.shard) != (first.layout.model, first.layout.packing, shard):
                raise TransferRefused("no_layout", f"the layout in place {rank} is of another model or rank")
        return arenas

    def _arena(self, opened: OpenBody, fingerprint: bytes) -> Arena:
        arena = self._pool.arena_of(fingerprint)
        is_foreign = fingerprint in self._foreign
        if arena is not None and not (opened.is_copy and is_foreign):
            if is_foreign:
                self._foreign.move_to_end(fingerprint)
            return arena
        layout = next((layout for layout in opened.layouts if layout.fingerprint == fingerprint), None)
        # A copy has no reader whose blocks it could be repacked into.
        if layout is None or opened.is_copy or self._unlike_reader(layout) is None:
            raise TransferRefused("no_layout", f"no engine on {self._name} has this layout")
        self._make_room(frozenset(opened.fingerprints))
        arena = self._pool.arena(layout)
        self._foreign[fingerprint] = None
        return arena

    def _make_room(self, needed: frozenset[bytes]) -> None:
        """Drop the least recently used foreign arena that is empty, if there are too many.

        Raises:
            TransferRefused: Every foreign arena is in use or needed.
        """
        if len(self._foreign) < self._max_foreign:
            return
        unneeded = (fingerprint for fingerprint in self._foreign if fingerprint not in needed)
        dropped = next((fingerprint for fingerprint in unneeded if self._pool.drop(fingerprint)), None)
        if dropped is None:
            raise TransferRefused("no_memory", f"{self._max_foreign} layouts of other engines are in use")
        del self._foreign[dropped]

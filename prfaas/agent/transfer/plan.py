"""The plan of a transfer: which object on the wire is which block of which rank, equal on both sides (pure).

Objects are numbered rank by rank, in each rank group by group, in each group block by block, so that the blocks of
one group and rank are a run. An object's bytes are one block over all layers of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgpack

from prfaas.agent.engine.protocol import pack_groups, unpack_groups
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.errors import LayoutError, RemoteProtocolError
from prfaas.grants import MAX_GRANT_BYTES, GrantKind
from prfaas.hashing import HASH_BYTES, NO_HASH
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import FINGERPRINT_BYTES, MAX_LAYERS, Layout
from prfaas.kv.parts import LayerSlice
from prfaas.transport.codec.fp8 import DTYPE
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Fields, fields_of
from prfaas.transport.ranges import Ranges
from prfaas.types import BlockHash, GroupBlocks

LINK_PROBE = "link_probe"
_USES: dict[str, GrantKind] = {"open": "transfer", "copy": "copy"}
MAX_KIND_BYTES = 16
MAX_BEGINNING_BYTES = 32 + MAX_GRANT_BYTES  # of an open up to the end of its grant
MAX_RANKS = 4096
MAX_LAYOUT_BYTES = 256 << 10  # of one rank: 1300 layers; while it is unpacked it may take 20 MiB, and 15 ms
MAX_LAYOUTS_BYTES = 1 << 20  # of all ranks: 5000 layers
MAX_TRACE_BYTES = 255


@dataclass(frozen=True)
class ObjectRange:
    """Objects [first_object, first_object + num_blocks): the blocks of `blocks` on `rank`."""

    rank: int
    position: int  # of `blocks` in the transfer's group list
    first_object: int
    group: KVGroup
    blocks: GroupBlocks


@dataclass(frozen=True)
class TransferPlan:
    """`layouts[rank]` of one engine and the block lists of one transfer of `num_tokens` tokens."""

    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...]
    num_tokens: int

    @cached_property
    def runs(self) -> tuple[ObjectRange, ...]:
        return tuple(self._runs())

    def _runs(self) -> Iterator[ObjectRange]:
        first_object = 0
        for rank, layout in enumerate(self.layouts):
            for position, blocks in enumerate(self.groups):
                yield ObjectRange(rank, position, first_object, layout.groups[blocks.group], blocks)
                first_object += blocks.num_blocks

    @cached_property
    def object_bytes(self) -> list[int]:
        return [run.group.block_bytes for run in self.runs for _ in run.blocks.hashes]

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.object_bytes)

    @cached_property
    def attention_bytes(self) -> int:
        """Everything but linear states: what can leave before the last chunk's forward pass ends."""
        return sum(run.group.block_bytes * run.blocks.num_blocks for run in self.runs if not run.group.is_state)

    @cached_property
    def castable(self) -> Ranges:
        """Objects that a lossy link may cast: blocks of attention whose values all are of the dtype that it knows."""
        return Ranges(
            (run.first_object, run.first_object + run.blocks.num_blocks)
            for run in self.runs
            if not run.group.is_state and not _unknown_dtypes(run.group)
        )

    def run_of(self, rank: int, position: int) -> ObjectRange:
        return self.runs[rank * len(self.groups) + position]

    def identities(self, run: ObjectRange) -> Iterator[BlockIdentity]:
        """Identity of each block of a run, in order. A partial last block counts, like a state, for exactly its length."""
        parent = run.blocks.parent
        for index, block_hash in enumerate(run.blocks.hashes):
            end = (run.blocks.first_block + index + 1) * run.group.block_tokens
            if run.group.is_state or end > self.num_tokens:
                unit = self._last_unit or parent
                yield BlockIdentity(run.blocks.group, block_hash, unit, self.num_tokens, parent, self.root)
            else:
                yield BlockIdentity(run.blocks.group, block_hash, parent, end, parent, self.root)
            parent = block_hash

    @cached_property
    def root(self) -> BlockHash:
        """Hash of model and tenant, which an attention group states that begins with the prompt; else NO_HASH."""
        kinds = self.layouts[0].groups
        firsts = (blocks for blocks in self.groups if not kinds[blocks.group].is_state)
        return next((blocks.parent for blocks in firsts if not blocks.first_block), NO_HASH)

    @cached_property
    def _last_unit(self) -> BlockHash | None:
        """Hash of the last full 16-token unit, which the linear groups state."""
        kinds = self.layouts[0].groups
        return next((blocks.parent for blocks in self.groups if kinds[blocks.group].is_state), None)

    def nested(self, per_object: list[int]) -> list[list[list[int]]]:
        """One number per object as [rank][position][block], the form that engines get."""
        result: list[list[list[int]]] = [[] for _ in self.layouts]
        for run in self.runs:
            result[run.rank].append(per_object[run.first_object : run.first_object + run.blocks.num_blocks])
        return result


def make_plan(layouts: tuple[Layout, ...], groups: tuple[GroupBlocks, ...], num_tokens: int) -> TransferPlan:
    """The plan of a transfer.

    Raises:
        RemoteProtocolError: the block lists do not fit the layouts or the length.
    """
    known = min(len(layout.groups) for layout in layouts)
    for blocks in groups:
        if blocks.group >= known:
            raise RemoteProtocolError("plan", f"group {blocks.group} of {known}")
        group = layouts[0].groups[blocks.group]
        if group.is_state:
            fits = blocks.num_blocks == 1
        else:
            fits = blocks.first_block + blocks.num_blocks <= -(-num_tokens // group.block_tokens)
        if not fits:
            raise RemoteProtocolError(
                "plan", f"group {blocks.group}: {blocks.num_blocks} blocks do not fit {num_tokens} tokens"
            )
    return TransferPlan(layouts, groups, num_tokens)


def _unknown_dtypes(group: KVGroup) -> list[LayerSlice]:
    return [layer for layer in group.layers if layer.dtype != DTYPE]


def check_castable(layout: Layout) -> None:
    """Raise LayoutError where a lossy link would not know how to cast a layer of attention."""
    for group in layout.groups:
        if not group.is_state and (unknown := _unknown_dtypes(group)):
            its = unknown[0]
            raise LayoutError(f"layer {its.name} dtype: {its.dtype}; lossy_fp8 is set, which knows {DTYPE} alone")


@dataclass(frozen=True)
class CopiedPrefix:
    """What an OPEN says of a prefix that is copied, of which the grant has the rest: its blocks follow from both.

    `units` are as in `Prefix`; `root` is what the first one hangs on, NO_HASH where no block says it.
    """

    units: bytes
    root: BlockHash


@dataclass(frozen=True)
class OpenBody:
    """What a sender says of its transfer, opaque to the transport; `layouts` may be left out once the peer accepted them.

    Of a copy nothing but prefix blocks remain: no engine of the receiver claims it. `trace` is the sender's traceparent and
    left out where it makes no spans, so that agents that do not know it take the rest.
    """

    grant: bytes
    fingerprints: tuple[bytes, ...]
    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...] = ()
    copied: CopiedPrefix | None = None  # in place of `groups`
    trace: str = ""

    @property
    def is_copy(self) -> bool:
        return self.copied is not None

    def encode(self) -> bytes:
        layouts = [layout.to_dict() for layout in self.layouts]
        kind = "copy" if self.is_copy else "open"
        blocks = pack_groups(self.groups) if self.copied is None else [self.copied.units, self.copied.root]
        parts = [kind, self.grant, list(self.fingerprints), layouts, blocks]
        body: bytes = msgpack.packb([*parts, self.trace] if self.trace else parts)
        return body

    @staticmethod
    def decode(
        body: bytes, *, wants_layouts: Callable[[tuple[bytes, ...], int], bool] = lambda fingerprints, num_bytes: True
    ) -> OpenBody:
        """The inverse of `encode`. The layouts with these fingerprints, of so many bytes, are left out where nobody wants them.

        Raises:
            RemoteProtocolError: it has another form.
            LayoutError: a layout is malformed.
        """
        with fields_of(body, reason="open_body", what="not an open of this version") as fields:
            is_traced = fields.array(5, 6) == 6
            use, grant = _use(fields), fields.octets(MAX_GRANT_BYTES)
            fingerprints = tuple(fields.octets(FINGERPRINT_BYTES) for _ in fields.items(MAX_RANKS))
            described = fields.packed(max_bytes=MAX_LAYOUTS_BYTES)
            layouts = _read_layouts(described) if wants_layouts(fingerprints, len(described)) else ()
            groups = _groups(fields) if use == "transfer" else ()
            copied = _copied(fields) if use == "copy" else None
            trace = fields.text(MAX_TRACE_BYTES) if is_traced else ""
            if not fingerprints:
                raise ValueError("an open has at least one fingerprint")
            return OpenBody(grant, fingerprints, layouts, groups, copied, trace)


def grant_of(body: bytes) -> tuple[bytes, GrantKind]:
    """The grant of an open or a copy, and for what it must be. Nothing after it is read: the grant says whether to.

    Raises:
        RemoteProtocolError: it has another form.
    """
    beginning = memoryview(body)[:MAX_BEGINNING_BYTES]
    with fields_of(beginning, reason="open_body", what="not an open of this version", is_beginning=True) as fields:
        fields.array(5, 6)
        use = _use(fields)
        return fields.octets(MAX_GRANT_BYTES), use


def _read_layouts(described: memoryview) -> tuple[Layout, ...]:
    with fields_of(described, reason="open_body", what="no layouts of this version") as fields:
        return tuple(read_layout(fields.packed(max_bytes=MAX_LAYOUT_BYTES)) for _ in fields.items(MAX_RANKS))


def read_layout(packed: bytes | memoryview) -> Layout:
    """The layout that a peer has packed, which takes up to eighty times its bytes meanwhile.

    Raises:
        RemoteProtocolError: it is no map.
        LayoutError: it is malformed.
    """
    with fields_of(packed, reason="open_body", what="no layout of this version") as fields:
        return Layout.from_dict(fields.any(dict, max_bytes=MAX_LAYOUT_BYTES))


def _use(fields: Fields) -> GrantKind:
    kind = fields.text(MAX_KIND_BYTES)
    if kind not in _USES:
        raise ValueError(f"{kind!r} is no open")
    return _USES[kind]


def _groups(fields: Fields) -> tuple[GroupBlocks, ...]:
    return unpack_groups([_group(fields) for _ in fields.items(MAX_LAYERS)])


def _group(fields: Fields) -> list[object]:
    fields.array(4)
    return [fields.whole(), fields.whole(), fields.octets(MAX_BODY_BYTES), fields.octets(HASH_BYTES)]


def _copied(fields: Fields) -> CopiedPrefix:
    fields.array(2)
    return CopiedPrefix(fields.octets(MAX_BODY_BYTES), BlockHash(fields.exactly(HASH_BYTES)))


def encode_probe(layout: Layout) -> bytes:
    """The body of an `open` that carries no object: would you accept this layout?"""
    body: bytes = msgpack.packb(["probe", layout.to_dict()])
    return body


def probed_layout(body: bytes) -> memoryview:
    """The layout that a probe asks about, packed; what it says is not looked at.

    Raises:
        RemoteProtocolError: it is no probe.
    """
    with fields_of(body, reason="open_body", what="not a probe of this version") as fields:
        fields.array(2)
        if fields.text(MAX_KIND_BYTES) != "probe":
            raise ValueError("an open without objects is a probe")
        return fields.packed(max_bytes=MAX_LAYOUT_BYTES)


def encode_link_probe(grant: bytes) -> bytes:
    """The body of an `open` whose objects have no meaning: they show what the link carries."""
    body: bytes = msgpack.packb([LINK_PROBE, grant])
    return body


def is_link_probe(body: bytes) -> bool:
    """Whether an `open` is of that kind, or pretends to be."""
    return body.startswith(encode_link_probe(b"")[: 2 + len(LINK_PROBE)])


def decode_link_probe(body: bytes) -> bytes:
    """The grant of a probe.

    Raises:
        RemoteProtocolError: it has another form.
    """
    with fields_of(body, reason="open_body", what="not a probe of this version") as fields:
        fields.array(2)
        fields.text(MAX_KIND_BYTES)
        return fields.octets(MAX_GRANT_BYTES)


def is_prefix_block(block_hash: BlockHash) -> bool:
    """Whether later requests may reuse the block: it is full, and hashed."""
    return block_hash != NO_HASH

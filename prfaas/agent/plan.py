"""The plan of a transfer: which object on the wire is which block of which rank, equal on both sides (pure).

Objects are numbered rank by rank, in each rank group by group, in each group block by block, so that the blocks of
one group and rank are a run. An object's bytes are one block over all layers of its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgpack

from prfaas.agent.protocol import pack_groups, unpack_groups
from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.cachepool.run import BlockIdentity
from prfaas.errors import LayoutError, RemoteProtocolError
from prfaas.hashing import HASH_BYTES, NO_HASH
from prfaas.transport.lossy_cast import DTYPE
from prfaas.transport.ranges import Ranges
from prfaas.types import BlockHash, GroupBlocks

LINK_PROBE = "link_probe"


@dataclass(frozen=True)
class Run:
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
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._runs())

    def _runs(self) -> Iterator[Run]:
        first_object = 0
        for rank, layout in enumerate(self.layouts):
            for position, blocks in enumerate(self.groups):
                yield Run(rank, position, first_object, layout.groups[blocks.group], blocks)
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
        return sum(
            run.group.block_bytes * run.blocks.num_blocks for run in self.runs if run.group.kind != "linear_state"
        )

    @cached_property
    def castable(self) -> Ranges:
        """Objects that a lossy link may cast: blocks of attention whose values all are of the dtype that it knows."""
        return Ranges(
            (run.first_object, run.first_object + run.blocks.num_blocks)
            for run in self.runs
            if run.group.kind != "linear_state" and not _unknown_dtypes(run.group)
        )

    def run_of(self, rank: int, position: int) -> Run:
        return self.runs[rank * len(self.groups) + position]

    def identities(self, run: Run) -> Iterator[BlockIdentity]:
        """Identity of each block of a run, in order. A partial last block counts, like a state, for exactly its length."""
        parent = run.blocks.parent
        for index, block_hash in enumerate(run.blocks.hashes):
            end = (run.blocks.first_block + index + 1) * run.group.block_tokens
            if run.group.kind == "linear_state" or end > self.num_tokens:
                unit = self._last_unit or parent
                yield BlockIdentity(run.blocks.group, block_hash, unit, self.num_tokens, parent, self.root)
            else:
                yield BlockIdentity(run.blocks.group, block_hash, parent, end, parent, self.root)
            parent = block_hash

    @cached_property
    def root(self) -> BlockHash:
        """Hash of model and tenant, which an attention group states that begins with the prompt; else NO_HASH."""
        kinds = self.layouts[0].groups
        firsts = (blocks for blocks in self.groups if kinds[blocks.group].kind != "linear_state")
        return next((blocks.parent for blocks in firsts if not blocks.first_block), NO_HASH)

    @cached_property
    def _last_unit(self) -> BlockHash | None:
        """Hash of the last full 16-token unit, which the linear groups state."""
        kinds = self.layouts[0].groups
        return next((blocks.parent for blocks in self.groups if kinds[blocks.group].kind == "linear_state"), None)

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
        kind, block_tokens = layouts[0].groups[blocks.group].kind, layouts[0].groups[blocks.group].block_tokens
        if kind == "linear_state":
            fits = blocks.num_blocks == 1
        else:
            fits = blocks.first_block + blocks.num_blocks <= -(-num_tokens // block_tokens)
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
        if group.kind != "linear_state" and (unknown := _unknown_dtypes(group)):
            its = unknown[0]
            raise LayoutError(f"layer {its.name} dtype: {its.dtype}; lossy_fp8 is set, which knows {DTYPE} alone")


@dataclass(frozen=True)
class Copied:
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
    copied: Copied | None = None  # in place of `groups`
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
    def decode(body: bytes) -> OpenBody:
        """The inverse of `encode`.

        Raises:
            RemoteProtocolError: it has another form.
            LayoutError: a layout is malformed.
        """
        try:
            kind, grant, fingerprints, layouts, blocks, *trace = msgpack.unpackb(body)
            described = tuple(Layout.from_dict(layout) for layout in layouts)
            hashes = tuple(map(_bytes, fingerprints))
            groups = unpack_groups(blocks) if kind == "open" else ()
            copied = _copied(*blocks) if kind == "copy" else None
            opened = OpenBody(_bytes(grant), hashes, described, groups, copied, *trace)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError("open_body", f"not an open of this version: {error!r}") from error
        if not isinstance(opened.trace, str):
            raise RemoteProtocolError("open_body", "a trace is text")
        if kind not in ("open", "copy") or not fingerprints:
            raise RemoteProtocolError("open_body", "an open has at least one fingerprint")
        return opened


def _copied(units: object, root: object) -> Copied:
    if len(_bytes(root)) != HASH_BYTES:
        raise ValueError(f"a hash has {HASH_BYTES} bytes")
    return Copied(_bytes(units), BlockHash(_bytes(root)))


def encode_probe(layout: Layout) -> bytes:
    """The body of an `open` that carries no object: would you accept this layout?"""
    body: bytes = msgpack.packb(["probe", layout.to_dict()])
    return body


def decode_probe(body: bytes) -> Layout:
    """The layout that a probe asks about.

    Raises:
        RemoteProtocolError: it is no probe.
        LayoutError: the layout is malformed.
    """
    try:
        kind, layout = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("open_body", f"not a probe of this version: {error!r}") from error
    if kind != "probe":
        raise RemoteProtocolError("open_body", "an open without objects is a probe")
    return Layout.from_dict(layout)


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
    try:
        _, grant = msgpack.unpackb(body)
        return _bytes(grant)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("open_body", f"not a probe of this version: {error!r}") from error


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):  # of a number, `bytes` would make that many zeros
        raise TypeError("not bytes")
    return value


def is_prefix_block(block_hash: BlockHash) -> bool:
    """Whether later requests may reuse the block: it is full, and hashed."""
    return block_hash != NO_HASH

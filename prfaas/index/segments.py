"""Announcements of a node's pool in the form that travels, is stored and is applied: segments and checkpoints.

A *cell* is 64 consecutive blocks of one block size; its head is the hash of its first block. A segment is a path from
the head through the blocks that it names, so its receiver needs no earlier announcement to place it. Inside a cell only
8 of the 16 bytes of a hash are compared: the head has already fixed everything before it.

A window may begin inside a cell, where its group's size is no full attention's. Then the window's first block is the head.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from prfaas.kv.layout import Layout
from prfaas.pool_events import Tier
from prfaas.types import BlockHash

CELL_BLOCKS = 64
TAIL_BYTES = 8
DIGEST_MODULUS = 1 << 64


@dataclass(frozen=True, order=True)
class Holding:
    """Part of a node's pool: a KV group of one layout, and so of one shard, in one tier."""

    layout: bytes  # Fingerprint.
    group: int
    tier: Tier


@dataclass(frozen=True)
class Segment:
    """Blocks of one cell that were stored or removed.

    Bit i of `bitmap` stands for the block whose hash begins with `tails[8·i:]`. `states` are such bitmaps, by holding,
    of the blocks at whose end the same node has a linear state. For a state's own holding `bitmap` means the same.
    """

    holding: Holding
    head: BlockHash
    tails: bytes
    bitmap: int
    stored: bool
    states: tuple[tuple[Holding, int], ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """Linear state or partial last block, which is valid at one exact length only.

    `anchor` is the hash of the last full 16-token unit at or before `num_tokens`; it has no meaning for a partial block.
    `head` is the head of the cell with the block that a linear state ends with, if the node knows that block.
    """

    holding: Holding
    block_hash: BlockHash
    anchor: BlockHash
    num_tokens: int
    stored: bool
    head: BlockHash | None = None


Announcement = Segment | Checkpoint


@dataclass(frozen=True)
class Digest:
    """Contents of a holding, in any order: a count, and the sum of 8 bytes of every hash modulo 2^64."""

    num_blocks: int = 0
    total: int = 0

    def plus(self, added: Digest) -> Digest:
        return Digest(self.num_blocks + added.num_blocks, (self.total + added.total) % DIGEST_MODULUS)

    def minus(self, gone: Digest) -> Digest:
        return Digest(self.num_blocks - gone.num_blocks, (self.total - gone.total) % DIGEST_MODULUS)

    def __str__(self) -> str:
        return f"{self.num_blocks}:{self.total:016x}"


def grid_tokens(layout: Layout) -> int:
    """Return the size of the blocks at whose ends states are marked: the first full-attention group's, or 0."""
    return next((group.block_tokens for group in layout.groups if group.keeps_all_tokens), 0)


def begins_anywhere(layout: Layout, group: int) -> bool:
    """Return whether chains of this group may begin inside a prompt: no full attention tells what lies before a window."""
    windows = layout.groups[group]
    sizes = {full.block_tokens for full in layout.groups if full.keeps_all_tokens}
    return not windows.is_state and not windows.keeps_all_tokens and windows.block_tokens not in sizes


def digest_of_node(digests: Mapping[Holding, Digest]) -> Digest:
    """Return one digest of everything that a node holds, for people and pages."""
    return functools.reduce(Digest.plus, list(digests.values()), Digest())


def digest_of_tails(tails: bytes, bitmap: int) -> Digest:
    """Return the digest of the blocks of a path whose bit is set."""
    words = array("Q", tails)
    if bitmap != (1 << len(words)) - 1:
        words = array("Q", [word for index, word in enumerate(words) if bitmap >> index & 1])
    return Digest(len(words), sum(words) % DIGEST_MODULUS)


def short_hash(block_hash: bytes) -> int:
    """Return the first 8 bytes as a number, which digests sum and filters look up."""
    return int.from_bytes(block_hash[:TAIL_BYTES], "little")


def digest_of_hash(block_hash: bytes) -> Digest:
    return Digest(1, short_hash(block_hash))


def digest_of_hashes(hashes: Collection[bytes]) -> Digest:
    return Digest(len(hashes), int(np.frombuffer(b"".join(hashes), np.uint64)[::2].sum()))

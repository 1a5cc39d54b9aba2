"""The table of runs: an implicit radix tree of all chains of one block size, without pointers.

A cell's first run is keyed by the cell's head. If a chain diverges inside a run, the rest of its cell is a run of its own,
keyed by (head, offset, first diverging block). A walk compares a run with the wanted chain, and the number of common
blocks gives the key of the next run. A look-up of 2,000 blocks takes 30 to 50 µs.

A run is packed as bytes, about 560 for 64 blocks and one holder, without an object per block:

    u16 number of holders | (u32 holder, u64 bitmap) per holder, ascending | 8 bytes of every block's hash
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import NamedTuple

from prfaas.hashing import HASH_BYTES
from prfaas.index.query import Chain
from prfaas.index.segments import CELL_BLOCKS, TAIL_BYTES, Digest, digest_of_tails
from prfaas.types import BlockHash

_COUNT = Struct("<H")
_ENTRY = Struct("<IQ")
MAX_HOLDERS = (1 << 16) - 1  # Further holders are left out: such a run is found anyway.


def pack(holders: bytes, tails: bytes) -> bytes:
    return _COUNT.pack(len(holders) // _ENTRY.size) + holders + tails


def split(run: bytes) -> tuple[bytes, bytes]:
    """Return a run's packed holders and its tails."""
    end = _COUNT.size + (run[0] | run[1] << 8) * _ENTRY.size
    return run[_COUNT.size : end], run[end:]


def pack_holders(bitmaps: Iterable[tuple[int, int]]) -> bytes:
    return b"".join([_ENTRY.pack(holder, bitmap) for holder, bitmap in sorted(bitmaps) if bitmap])


def unpack_holders(holders: bytes) -> list[tuple[int, int]]:
    """Return (holder, bitmap) pairs, ascending."""
    return list(_ENTRY.iter_unpack(holders))


def with_bits(holders: bytes, holder: int, bits: int) -> tuple[bytes, int]:
    """Return the packed holders with `bits` added to `holder`, and the bits that are new."""
    bitmaps = dict(_ENTRY.iter_unpack(holders))
    before = bitmaps.get(holder, 0)
    if not bits & ~before or (holder not in bitmaps and len(bitmaps) >= MAX_HOLDERS):
        return holders, 0
    bitmaps[holder] = before | bits
    return pack_holders(bitmaps.items()), bits & ~before


def without_bits(holders: bytes, holder: int, bits: int) -> tuple[bytes, int]:
    """Return the packed holders with `bits` removed from `holder`, and the bits that were there."""
    bitmaps = dict(_ENTRY.iter_unpack(holders))
    before = bitmaps.get(holder, 0)
    if not before & bits:
        return holders, 0
    bitmaps[holder] = before & ~bits
    return pack_holders(bitmaps.items()), before & bits


def common_blocks(left: bytes, right: bytes) -> int:
    """Return how many leading blocks two lists of tails share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // TAIL_BYTES
    difference = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((difference & -difference).bit_length() - 1) // (TAIL_BYTES * 8)


_CELL_BYTES = CELL_BLOCKS * TAIL_BYTES
_MAX_FORKS_SEARCHED = 32  # Of a cell, for one block without its path; they take about 10 µs.


class Piece(NamedTuple):
    """Consecutive blocks from `first_block` whose packed holders are the same in every cell of 64."""

    first_block: int
    num_blocks: int
    holders: bytes


class RunTable:
    """The runs of all chains of one block size."""

    def __init__(self) -> None:
        self._runs: dict[bytes, bytes] = {}
        self._forks: dict[BlockHash, dict[bytes, bytes]] = {}  # By head: the run that each fork depends on.
        self._marked_anywhere: set[BlockHash] = set()  # Heads of cells where a mark may stand on any fork.

    def __len__(self) -> int:
        return len(self._runs)

    def store(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Add a holder of the blocks of `bitmap` on this path, and return the digest of the new ones."""
        added, above = Digest(), b""
        offset, num_blocks = 0, len(tails) // TAIL_BYTES
        while offset < num_blocks:
            key, wanted, bits = _key(head, offset, tails), tails[offset * TAIL_BYTES :], bitmap >> offset
            found = self._runs.get(key)
            holders, known = split(found) if found else (b"", b"")
            if known == wanted[: len(known)]:
                known = wanted  # The path continues at the run's end, so the run is extended in place.
            common = common_blocks(known, wanted)
            holders, new = with_bits(holders, holder, bits & ((1 << common) - 1))
            self._runs[key] = pack(holders, known)
            if found is None and offset:
                self._forks.setdefault(head, {})[key] = above
            added = added.plus(digest_of_tails(wanted[: common * TAIL_BYTES], new))
            offset, above = offset + common, key
        return added

    def store_marks(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Do `mark` for the blocks of `bitmap` on this path, and return the digest of the new marks."""
        added = self.store(holder, head=head, tails=tails, bitmap=bitmap)
        if len(self._forks.get(head, ())) > _MAX_FORKS_SEARCHED:
            self._marked_anywhere.add(head)
        return added

    def remove(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Remove a holder of the blocks of `bitmap`, and return the digest of the ones it had."""
        removed = Digest()
        for key, offset, holders, known, common in self._walk(head, tails):
            bits = bitmap >> offset & ((1 << common) - 1)
            holders, gone = without_bits(holders, holder, bits)
            if gone:
                self._runs[key] = pack(holders, known)
                removed = removed.plus(digest_of_tails(known[: common * TAIL_BYTES], gone))
        return removed

    def mark(self, holder: int, *, head: BlockHash, offset: int, tail: bytes) -> bool | None:
        """Mark one block of a cell for a holder. Return False if the mark is known, None if the block is not."""
        return self._change_one(with_bits, holder, head=head, offset=offset, tail=tail)

    def unmark(self, holder: int, *, head: BlockHash, offset: int, tail: bytes) -> bool | None:
        """Remove the mark of one block. Return False if there was none, None if the block is not known."""
        return self._change_one(without_bits, holder, head=head, offset=offset, tail=tail)

    def _change_one(
        self,
        change: Callable[[bytes, int, int], tuple[bytes, int]],
        holder: int,
        *,
        head: BlockHash,
        offset: int,
        tail: bytes,
    ) -> bool | None:
        """Change the mark of the block at `offset` of the cell, whose hash begins with `tail`."""
        limit = None if head in self._marked_anywhere else _MAX_FORKS_SEARCHED
        for key in (head, *itertools.islice(self._forks.get(head, ()), limit)):
            found, place = self._runs.get(key), offset - _offset(key)
            if found is None or place < 0:
                continue
            holders, tails = split(found)
            if tails[place * TAIL_BYTES : (place + 1) * TAIL_BYTES] == tail:
                holders, changed = change(holders, holder, 1 << place)
                if changed:
                    self._runs[key] = pack(holders, tails)
                return bool(changed)
        return None

    def _walk(self, head: bytes, tails: bytes) -> Iterator[tuple[bytes, int, bytes, bytes, int]]:
        """Yield (key, offset, holders, tails, common blocks) of every run along the path."""
        offset = 0
        while offset * TAIL_BYTES < len(tails):
            key = _key(head, offset, tails)
            found = self._runs.get(key)
            if found is None:
                return
            holders, known = split(found)
            common = common_blocks(known, tails[offset * TAIL_BYTES :])
            yield key, offset, holders, known, common
            offset += common

    def pieces(self, chain: Chain) -> list[Piece]:
        """Return the holders along the chain, without cells of which nothing is known."""
        num_cells = len(chain.tails) // CELL_BLOCKS
        heads, cells = _per_cell(num_cells)
        found = [*map(self._runs.get, heads.unpack_from(chain.hashes), itertools.repeat(b""))]
        agree = [*map(_ends_with, found, cells.unpack_from(chain.tails.data))]
        num_whole = agree.index(False) if False in agree else num_cells
        pieces = _joined([run[2:-_CELL_BYTES] for run in found[:num_whole]])
        for cell in range(num_whole, num_cells):
            if found[cell]:
                pieces += self._partial(chain, cell * CELL_BLOCKS)
        return pieces + self._partial(chain, num_cells * CELL_BLOCKS)

    def _partial(self, chain: Chain, block: int) -> list[Piece]:
        """Return the pieces of the cell that begins at `block`, as far as the chain goes."""
        head = chain.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        tails = chain.tails[block : block + CELL_BLOCKS].tobytes()
        return [Piece(block + offset, common, holders) for _, offset, holders, _, common in self._walk(head, tails)]

    def sweep(self, head: BlockHash, is_alive: Callable[[int], bool]) -> int:
        """Forget dead holders in a cell and runs that nobody holds, and return the number of runs dropped."""
        dropped = 0
        forks = self._forks.get(head, {})
        needed: set[bytes] = set()
        for key in [*sorted(forks, key=_offset, reverse=True), head]:
            found = self._runs.get(key)
            if found is None:
                continue
            holders, tails = split(found)
            alive = pack_holders([item for item in unpack_holders(holders) if is_alive(item[0])])
            if alive or key in needed:
                self._runs[key] = pack(alive, tails)
                needed.add(forks.get(key, head))
            else:
                del self._runs[key]
                forks.pop(key, None)
                dropped += 1
        if not forks:
            self._forks.pop(head, None)
            self._marked_anywhere.discard(head)
        return dropped

    def heads(self) -> Iterator[BlockHash]:
        """Return the heads of all cells at the moment of the call."""
        return (BlockHash(key) for key in tuple(self._runs) if len(key) == HASH_BYTES)

    def cell(self, head: BlockHash) -> list[tuple[bytes, list[tuple[int, int]]]]:
        """Return for each run of a cell its path (tails from the head on) and (holder, bitmap over that path)."""
        forks = self._forks.get(head, {})
        paths: dict[bytes, bytes] = {}
        found: list[tuple[bytes, list[tuple[int, int]]]] = []
        for key in [head, *sorted(forks, key=_offset)]:
            run = self._runs.get(key)
            if run is None:
                continue
            holders, tails = split(run)
            offset = _offset(key)
            paths[key] = (paths[forks[key]][: offset * TAIL_BYTES] if offset else b"") + tails
            found.append((paths[key], [(holder, bits << offset) for holder, bits in unpack_holders(holders)]))
        return found


_ends_with: Callable[[bytes, bytes], bool] = bytes.endswith


@functools.lru_cache(1024)
def _per_cell(num_cells: int) -> tuple[Struct, Struct]:
    """Return structs that extract the cells' heads from a chain's hashes, and their blocks from its tails."""
    skipped = (CELL_BLOCKS - 1) * HASH_BYTES
    return Struct(f"{HASH_BYTES}s{skipped}x" * num_cells), Struct(f"{_CELL_BYTES}s" * num_cells)


def _joined(holders: list[bytes]) -> list[Piece]:
    """Join adjacent cells with the same holders, from a chain's start on."""
    pieces: list[Piece] = []
    first = 0
    for same, cells in itertools.groupby(holders):
        num_blocks = len(list(cells)) * CELL_BLOCKS
        pieces.append(Piece(first, num_blocks, same))
        first += num_blocks
    return pieces


def _key(head: bytes, offset: int, tails: bytes) -> bytes:
    if not offset:
        return head
    at = offset * TAIL_BYTES
    return head + bytes((offset,)) + tails[at : at + TAIL_BYTES]


def _offset(key: bytes) -> int:
    return key[HASH_BYTES] if len(key) > HASH_BYTES else 0


def bitmaps(pieces: list[Piece]) -> dict[int, int]:
    """Return per holder a bitmap over the blocks of the prompt."""
    found: dict[int, int] = {}
    for piece in pieces:
        cells = piece.num_blocks // CELL_BLOCKS
        repeated = _REPEATED[cells] if cells < len(_REPEATED) else _repeated(cells)
        for holder, bits in unpack_holders(piece.holders):
            over = bits * repeated if cells else bits & ((1 << piece.num_blocks) - 1)
            found[holder] = found.get(holder, 0) | over << piece.first_block
    return found


def _repeated(cells: int) -> int:
    """Return the factor that repeats a 64-bit bitmap `cells` times."""
    return sum(1 << CELL_BLOCKS * index for index in range(cells))


_REPEATED = [_repeated(cells) for cells in range(257)]  # 256 cells are 256K tokens at 16 tokens per block.

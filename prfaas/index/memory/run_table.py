"""The table of runs: an implicit radix tree of all chains of one block size, without pointers.

A cell's first run is keyed by the cell's head. If a chain diverges inside a run, the rest of its cell is a run of its own,
keyed by (head, offset, first diverging block). A walk compares a run with the wanted chain, and the number of common
blocks gives the key of the next run. A look-up of 2,000 blocks takes 30 to 50 µs.

A run is packed as bytes, about 560 for 64 blocks and one holder, without an object per block:

    u16 number of holders | (u32 holder, u64 bitmap) per holder, ascending | 8 bytes of every block's hash
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np

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
    at, before = _find(holders, holder)
    new = bits & ~before
    if not new or (not before and len(holders) >= MAX_HOLDERS * _ENTRY.size):
        return holders, 0
    return _replaced(holders, at, before, _ENTRY.pack(holder, before | bits)), new


def without_bits(holders: bytes, holder: int, bits: int) -> tuple[bytes, int]:
    """Return the packed holders with `bits` removed from `holder`, and the bits that were there."""
    at, before = _find(holders, holder)
    left = before & ~bits
    if left == before:
        return holders, 0
    return _replaced(holders, at, before, _ENTRY.pack(holder, left) if left else b""), before & bits


def _find(holders: bytes, holder: int) -> tuple[int, int]:
    """Return where a holder's entry begins or would begin, and its bits, 0 without an entry."""
    first, end = 0, len(holders) // _ENTRY.size
    while first < end:
        middle = (first + end) // 2
        found, bits = _ENTRY.unpack_from(holders, middle * _ENTRY.size)
        if found == holder:
            return middle * _ENTRY.size, bits
        if found < holder:
            first = middle + 1
        else:
            end = middle
    return first * _ENTRY.size, 0


def _replaced(holders: bytes, at: int, before: int, entry: bytes) -> bytes:
    """Return the packed holders with the entry at `at` replaced, or inserted if there were no bits `before`."""
    return holders[:at] + entry + holders[at + _ENTRY.size if before else at :]


def common_blocks(left: bytes, right: bytes) -> int:
    """Return how many leading blocks two lists of tails share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // TAIL_BYTES
    difference = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((difference & -difference).bit_length() - 1) // (TAIL_BYTES * 8)


_CELL_BYTES = CELL_BLOCKS * TAIL_BYTES
_MAX_FORKS_SEARCHED = 32  # Of a cell, for one block without its path; they take about 10 µs.
_FIRST_RUN = b""  # Key of a cell's first run within the cell. A fork has one byte of offset and its first block's tail.


class Piece(NamedTuple):
    """Consecutive blocks from `first_block` whose packed holders are the same in every cell of 64."""

    first_block: int
    num_blocks: int
    holders: bytes


class RunTable:
    """The runs of all chains of one block size.

    A run goes with its last holder, unless forks depend on it. So removal costs as much as what it changes, and only
    holders that died need the sweep. The tables are dictionaries of bytes and numbers, which Python's garbage collector
    need not search; those of forks are one per cell, so that none grows by much at once.

    With `begin_anywhere` chains may begin inside a cell, and look-ups search all blocks of a prompt for their heads.
    """

    def __init__(self) -> None:
        self.begin_anywhere = False
        self._first: dict[bytes, bytes] = {}  # First run of each cell, by head.
        self._forks: dict[bytes, dict[bytes, bytes]] = {}  # By head: the other runs.
        self._above: dict[bytes, dict[bytes, bytes]] = {}  # By head: the run that each fork depends on.
        self._num_below: dict[bytes, dict[bytes, int]] = {}  # By head: number of forks that depend on a run.
        self._marks: dict[bytes, dict[bytes, bytes]] = {}  # By head of a cell with many forks: the run of each mark.
        self._num_forks = 0

    def __len__(self) -> int:
        return len(self._first) + self._num_forks

    def _get(self, head: bytes, key: bytes) -> bytes | None:
        return self._forks.get(head, _NO_RUNS).get(key) if key else self._first.get(head)

    def _put(self, head: bytes, key: bytes, run: bytes) -> None:
        if key:
            self._forks[head][key] = run
        else:
            self._first[head] = run

    def store(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Add a holder of the blocks of `bitmap` on this path, and return the digest of the new ones."""
        added, above = Digest(), _FIRST_RUN
        offset, num_blocks = 0, min(len(tails) // TAIL_BYTES, bitmap.bit_length())
        tails = tails[: num_blocks * TAIL_BYTES]
        while offset < num_blocks:
            key, wanted, bits = _key(offset, tails), tails[offset * TAIL_BYTES :], bitmap >> offset
            found = self._get(head, key)
            holders, known = split(found) if found else (b"", b"")
            if known == wanted[: len(known)]:
                known = wanted  # The path continues at the run's end, so the run is extended in place.
            common = common_blocks(known, wanted)
            holders, new = with_bits(holders, holder, bits & ((1 << common) - 1))
            if found is None and offset:
                self._add_fork(head, key, above)
            self._put(head, key, pack(holders, known))
            added = added.plus(digest_of_tails(wanted[: common * TAIL_BYTES], new))
            offset, above = offset + common, key
        return added

    def _add_fork(self, head: bytes, key: bytes, above: bytes) -> None:
        self._forks.setdefault(head, {})
        self._above.setdefault(head, {})[key] = above
        below = self._num_below.setdefault(head, {})
        below[above] = below.get(above, 0) + 1
        self._num_forks += 1

    def _drop_unheld(self, head: bytes, key: bytes) -> int:
        """Drop a run without holders and dependent forks, then those above it. Return the number of dropped runs."""
        dropped = 0
        while (run := self._get(head, key)) is not None:
            holders, tails = split(run)
            below = self._num_below.get(head, _NO_COUNTS)
            if holders or key in below:
                break
            self._forget_marks(head, key, tails)
            dropped += 1
            if not key:
                del self._first[head]
                break
            above = self._above[head].pop(key)
            del self._forks[head][key]
            self._num_forks -= 1
            below[above] -= 1
            if not below[above]:
                del below[above]
            if not below:
                del self._forks[head], self._above[head], self._num_below[head]
            key = above
        return dropped

    def _forget_marks(self, head: bytes, key: bytes, tails: bytes) -> None:
        marks = self._marks.get(head)
        if marks is None:
            return
        first = _offset(key)
        for at in range(0, len(tails), TAIL_BYTES):
            marks.pop(_mark(first + at // TAIL_BYTES, tails[at : at + TAIL_BYTES]), None)
        if not marks:
            del self._marks[head]

    def store_marks(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Do `mark` for the blocks of `bitmap` on this path, and return the digest of the new marks."""
        added = self.store(holder, head=head, tails=tails, bitmap=bitmap)
        if len(self._forks.get(head, _NO_RUNS)) > _MAX_FORKS_SEARCHED:
            marks = self._marks.setdefault(head, {})
            for key, offset, _, known, common in self._walk(head, tails):
                for place in range(common):
                    if bitmap >> offset + place & 1:
                        marks[_mark(offset + place, known[place * TAIL_BYTES : (place + 1) * TAIL_BYTES])] = key
        return added

    def remove(self, holder: int, *, head: BlockHash, tails: bytes, bitmap: int) -> Digest:
        """Remove a holder of the blocks of `bitmap`, and return the digest of the ones it had."""
        removed, last = Digest(), _FIRST_RUN
        for key, offset, holders, known, common in self._walk(head, tails):
            bits = bitmap >> offset & ((1 << common) - 1)
            holders, gone = without_bits(holders, holder, bits)
            if gone:
                self._put(head, key, pack(holders, known))
                removed = removed.plus(digest_of_tails(known[: common * TAIL_BYTES], gone))
            last = key
        self._drop_unheld(head, last)
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
        for key in self._runs_to_search(head, offset, tail):
            found, place = self._get(head, key), offset - _offset(key)
            if found is None or place < 0:
                continue
            holders, tails = split(found)
            if tails[place * TAIL_BYTES : (place + 1) * TAIL_BYTES] == tail:
                holders, changed = change(holders, holder, 1 << place)
                if changed:
                    self._put(head, key, pack(holders, tails))
                    self._drop_unheld(head, key)
                return bool(changed)
        return None

    def _runs_to_search(self, head: bytes, offset: int, tail: bytes) -> Iterator[bytes]:
        """Yield the runs that may have a block of which only its place is known. A known mark is always found."""
        yield _FIRST_RUN
        marked = self._marks.get(head, _NO_RUNS).get(_mark(offset, tail))
        if marked is not None:
            yield marked
        yield from tuple(itertools.islice(self._forks.get(head, ()), _MAX_FORKS_SEARCHED))

    def _walk(self, head: bytes, tails: bytes) -> Iterator[tuple[bytes, int, bytes, bytes, int]]:
        """Yield (key, offset, holders, tails, common blocks) of every run along the path."""
        offset = 0
        while offset * TAIL_BYTES < len(tails):
            key = _key(offset, tails)
            found = self._get(head, key)
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
        found = [*map(self._first.get, heads.unpack_from(chain.hashes), itertools.repeat(b""))]
        agree = [*map(_ends_with, found, cells.unpack_from(chain.tails.data))]
        num_whole = agree.index(False) if False in agree else num_cells
        pieces = _joined([run[2:-_CELL_BYTES] for run in found[:num_whole]])
        for cell in range(num_whole, num_cells):
            if found[cell]:
                pieces += self._partial(chain, cell * CELL_BLOCKS)
        pieces += self._partial(chain, num_cells * CELL_BLOCKS)
        if self.begin_anywhere:
            for block in self._inner_heads(chain):
                pieces += self._partial(chain, block)
        return pieces

    def _inner_heads(self, chain: Chain) -> Iterator[int]:
        """Yield the blocks with which a known chain begins inside a cell."""
        hashes = np.frombuffer(chain.hashes, f"V{HASH_BYTES}").tolist()
        found = itertools.compress(itertools.count(), map(self._first.__contains__, hashes))
        return (block for block in found if block % CELL_BLOCKS)

    def _partial(self, chain: Chain, block: int) -> list[Piece]:
        """Return the pieces of the cell that begins at `block`, as far as the chain goes."""
        head = chain.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        tails = chain.tails[block : block + CELL_BLOCKS].tobytes()
        return [Piece(block + offset, common, holders) for _, offset, holders, _, common in self._walk(head, tails)]

    def sweep(self, head: bytes, key: bytes, is_alive: Callable[[int], bool]) -> int:
        """Forget the dead holders of one run, and return the number of runs dropped."""
        run = self._get(head, key)
        if run is None:
            return 0
        holders, tails = split(run)
        alive = [item for item in unpack_holders(holders) if is_alive(item[0])]
        if len(alive) * _ENTRY.size < len(holders):
            self._put(head, key, pack(pack_holders(alive), tails))
        return 0 if alive else self._drop_unheld(head, key)

    def runs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (head, key) of the runs at the moment of the call, forks after the run that they depend on."""
        for head in tuple(self._first):
            yield head, _FIRST_RUN
            for key in tuple(self._forks.get(head, ())):
                yield head, key

    def path(self, head: bytes, key: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        """Return a run's path, as tails from the head on, and (holder, bitmap over that path); empty without the run."""
        run = self._get(head, key)
        if run is None:
            return b"", []
        holders, tails = split(run)
        offset = _offset(key)
        bitmaps = [(holder, bits << offset) for holder, bits in unpack_holders(holders)]
        while key:
            above = self._above[head][key]
            run = self._get(head, above)
            assert run is not None, "a run stays while forks depend on it"
            first = _offset(above)
            tails = split(run)[1][: (_offset(key) - first) * TAIL_BYTES] + tails
            key = above
        return tails, bitmaps


_NO_RUNS: dict[bytes, bytes] = {}
_NO_COUNTS: dict[bytes, int] = {}
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


def _key(offset: int, tails: bytes) -> bytes:
    """Return the key, within its cell, of the run that begins at `offset` of a path."""
    return _mark(offset, tails[offset * TAIL_BYTES : (offset + 1) * TAIL_BYTES]) if offset else _FIRST_RUN


def _mark(offset: int, tail: bytes) -> bytes:
    return bytes((offset,)) + tail


def _offset(key: bytes) -> int:
    return key[0] if key else 0


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

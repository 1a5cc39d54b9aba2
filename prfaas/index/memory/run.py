"""One run as bytes: up to 64 consecutive blocks of a chain, and who holds which of them.

    u16 number of holders | (u32 holder, u64 bitmap) per holder, ascending | 8 bytes of every block's hash

More holders than that number can say are not noted: a run so widely held is found all the same.

About 560 bytes for 64 blocks and one holder, 12 more for each further holder; no object per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from prfaas.index.segments import TAIL_BYTES

_COUNT = Struct("<H")
_ENTRY = Struct("<IQ")
MAX_HOLDERS = (1 << 16) - 1


def pack(holders: bytes, tails: bytes) -> bytes:
    return _COUNT.pack(len(holders) // _ENTRY.size) + holders + tails


def split(run: bytes) -> tuple[bytes, bytes]:
    """Packed holders and tails."""
    end = _COUNT.size + (run[0] | run[1] << 8) * _ENTRY.size
    return run[_COUNT.size : end], run[end:]


def pack_holders(bitmaps: Iterable[tuple[int, int]]) -> bytes:
    return b"".join([_ENTRY.pack(holder, bitmap) for holder, bitmap in sorted(bitmaps) if bitmap])


def unpack_holders(holders: bytes) -> list[tuple[int, int]]:
    """(holder, bitmap) ascending."""
    return list(_ENTRY.iter_unpack(holders))


def with_bits(holders: bytes, holder: int, bits: int) -> tuple[bytes, int]:
    """The packed holders after `holder` got `bits`, and those that are new to it."""
    bitmaps = dict(_ENTRY.iter_unpack(holders))
    before = bitmaps.get(holder, 0)
    if not bits & ~before or (holder not in bitmaps and len(bitmaps) >= MAX_HOLDERS):
        return holders, 0
    bitmaps[holder] = before | bits
    return pack_holders(bitmaps.items()), bits & ~before


def without_bits(holders: bytes, holder: int, bits: int) -> tuple[bytes, int]:
    """The packed holders after `holder` lost `bits`, and those that it had."""
    bitmaps = dict(_ENTRY.iter_unpack(holders))
    before = bitmaps.get(holder, 0)
    if not before & bits:
        return holders, 0
    bitmaps[holder] = before & ~bits
    return pack_holders(bitmaps.items()), before & bits


def common_blocks(ours: bytes, theirs: bytes) -> int:
    """How many leading blocks two lists of tails share."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length // TAIL_BYTES
    difference = int.from_bytes(ours[:length], "little") ^ int.from_bytes(theirs[:length], "little")
    return ((difference & -difference).bit_length() - 1) // (TAIL_BYTES * 8)

"""Newcomers: how much room there is for blocks that nobody has asked for since they were stored (pure).

Of what is stored most is never asked for again, and what is asked for must not leave for it; yet a share that is too small
loses blocks before their second request. So the share is learnt, after ARC (Megiddo and Modha, FAST '03): what left lately
is remembered by its hash, and a block that is stored again says which side it was missed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from prfaas.types import BlockHash

LEAST_SHARE = 1 / 16
MAX_REMEMBERED = 1 << 18  # hashes, about 150 bytes each; fewer where fewer blocks fit the room


class Newcomers:
    """Their bytes, and the most that they may be of a full room."""

    def __init__(self, room_bytes: int, *, most: float, learns: bool) -> None:
        self.used_bytes = 0
        self._most_bytes = int(room_bytes * most)
        self._least_bytes = min(self._most_bytes, int(room_bytes * LEAST_SHARE))
        self._room_bytes = room_bytes
        self._learns = learns
        self.limit_bytes = self._most_bytes
        self._gone = _Generations()

    @property
    def are_limited(self) -> bool:
        """Whether their share can ever be less than the room."""
        return self._learns or self._most_bytes < self._room_bytes

    def stored(self, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Blocks of one chain were stored; those that had left before, up to the first that had not, move the share."""
        self.used_bytes += len(hashes) * slot_bytes
        if not self._learns or hashes[0] not in self._gone:
            return
        missed = [self._gone.pop(its) for its in takewhile(self._gone.__contains__, hashes)]
        num_asked, ratio = sum(missed), self._gone.asked_ratio()
        more = (len(missed) - num_asked) * max(1.0, ratio) - num_asked * max(1.0, 1 / ratio)
        limit = self.limit_bytes + int(more * slot_bytes)
        self.limit_bytes = min(self._most_bytes, max(self._least_bytes, limit))

    def left(self, hashes: Sequence[BlockHash], num_newcomers: int, slot_bytes: int) -> None:
        """Blocks left from the tail of a chain, the first `num_newcomers` of them without having been asked for."""
        self.used_bytes -= num_newcomers * slot_bytes
        if self._learns:
            self._gone.add(hashes[:num_newcomers], was_asked=False)
            self._gone.add(hashes[num_newcomers:], was_asked=True)
            self._gone.forget_beyond(min(MAX_REMEMBERED, self._room_bytes // slot_bytes))


class _Generations:
    """The latest hashes, each with whether it had been asked for; the older half goes at once."""

    def __init__(self) -> None:
        self._young: dict[BlockHash, bool] = {}
        self._old: dict[BlockHash, bool] = {}
        self._num_asked = self._num_others = 1  # how often they came since the older generation began

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._young or block_hash in self._old

    def add(self, hashes: Sequence[BlockHash], *, was_asked: bool) -> None:
        self._young.update(dict.fromkeys(hashes, was_asked))
        if was_asked:
            self._num_asked += len(hashes)
        else:
            self._num_others += len(hashes)

    def forget_beyond(self, max_hashes: int) -> None:
        """Have the younger half be the older one once it is full."""
        if 2 * len(self._young) > max_hashes:
            self._old, self._young = self._young, {}
            num_asked = sum(self._old.values())
            self._num_asked, self._num_others = 1 + num_asked, 1 + len(self._old) - num_asked

    def pop(self, block_hash: BlockHash) -> bool:
        """Forget a hash; whether it had been asked for. Raises KeyError when it is not remembered."""
        was_asked = self._young.pop(block_hash, None)
        return self._old.pop(block_hash) if was_asked is None else was_asked

    def asked_ratio(self) -> float:
        """How many were remembered that had been asked for, for each that had not."""
        return self._num_asked / self._num_others

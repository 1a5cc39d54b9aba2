"""Leases: who uses which slots. A lease ends by its owner's answer or death, never by time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.run import Run
from prfaas.cachepool.slots import Slots

LeaseId = NewType("LeaseId", int)


@dataclass(eq=False)
class Lease:
    """Uses of slots by one owner. Of a quarantined one a thread may still write to the slots."""

    owner: str
    written: list[tuple[Slots, list[int]]] = field(default_factory=list)  # slots that the lease was given
    read: list[tuple[Run, int]] = field(default_factory=list)  # runs, and the end of what is read of them
    quarantined: bool = False


class Leases:
    """All leases of a pool."""

    def __init__(self) -> None:
        self._by_id: dict[LeaseId, Lease] = {}
        self._by_owner: dict[str, set[LeaseId]] = {}
        self._ids = itertools.count(1)
        self.quarantined: set[LeaseId] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, owner: str) -> LeaseId:
        lease = LeaseId(next(self._ids))
        self._by_id[lease] = Lease(owner)
        self._by_owner.setdefault(owner, set()).add(lease)
        return lease

    def __getitem__(self, lease: LeaseId) -> Lease:
        """Raises KeyError when the lease has ended."""
        return self._by_id[lease]

    def is_open(self, lease: LeaseId) -> bool:
        return lease in self._by_id

    def end(self, lease: LeaseId) -> Lease:
        """Forget the lease; the caller ends its uses. An empty one when it has ended before."""
        ended = self._by_id.pop(lease, None)
        if ended is None:
            return Lease("")
        self.quarantined.discard(lease)
        owned = self._by_owner[ended.owner]
        owned.discard(lease)
        if not owned:
            del self._by_owner[ended.owner]
        return ended

    def quarantine(self, lease: LeaseId) -> None:
        """The lease ends by `end` alone. Raises KeyError when it has ended."""
        self._by_id[lease].quarantined = True
        self.quarantined.add(lease)

    def of_owner(self, owner: str) -> list[LeaseId]:
        """What ends when the owner dies: all its leases but the quarantined ones."""
        return sorted(self._by_owner.get(owner, set()) - self.quarantined)

    def all(self) -> list[Lease]:
        return list(self._by_id.values())

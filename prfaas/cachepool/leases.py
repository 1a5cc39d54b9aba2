"""Leases: who uses which slots. Its owner ends a lease, by an answer or when it is found dead; never time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.run import Run
from prfaas.cachepool.slots import Slots

LeaseId = NewType("LeaseId", int)


@dataclass(eq=False)
class Lease:
    """Uses of slots by one owner, whose name is for people."""

    owner: str
    written: list[tuple[Slots, list[int]]] = field(default_factory=list)  # slots that the lease was given
    read: list[tuple[Run, int]] = field(default_factory=list)  # runs, and the end of what is read of them


class Leases:
    """All leases of a pool."""

    def __init__(self) -> None:
        self._by_id: dict[LeaseId, Lease] = {}
        self._ids = itertools.count(1)
        self._quarantined: dict[LeaseId, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, owner: str) -> LeaseId:
        lease = LeaseId(next(self._ids))
        self._by_id[lease] = Lease(owner)
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
        self._quarantined.pop(lease, None)
        return ended

    def quarantine(self, lease: LeaseId) -> None:
        """Somebody may still write to its slots. Raises KeyError when it has ended."""
        self._quarantined[lease] = self._by_id[lease]

    def quarantined(self) -> list[Lease]:
        """From any thread."""
        return list(self._quarantined.values())

    def all(self) -> list[Lease]:
        return list(self._by_id.values())

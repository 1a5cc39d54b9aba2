"""Leases: who uses which slots. A lease ends by its owner's answer or death, never by time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.slots import Slots

LeaseId = NewType("LeaseId", int)
Use = tuple[Slots, list[int]]


@dataclass(eq=False)
class Lease:
    """Uses of slots by one owner. Of a quarantined one a thread may still write to the slots."""

    owner: str
    uses: list[Use] = field(default_factory=list)
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

    def add(self, lease: LeaseId, slots: Slots, used: list[int]) -> None:
        """Note further uses. Raises KeyError when the lease has ended."""
        self._by_id[lease].uses.append((slots, used))

    def is_open(self, lease: LeaseId) -> bool:
        return lease in self._by_id

    def end(self, lease: LeaseId) -> list[Use]:
        """Forget the lease; its uses, which the caller releases. Nothing when it has ended before."""
        ended = self._by_id.pop(lease, None)
        if ended is None:
            return []
        self.quarantined.discard(lease)
        owned = self._by_owner[ended.owner]
        owned.discard(lease)
        if not owned:
            del self._by_owner[ended.owner]
        return ended.uses

    def quarantine(self, lease: LeaseId) -> None:
        """The lease ends by `end` alone. Raises KeyError when it has ended."""
        self._by_id[lease].quarantined = True
        self.quarantined.add(lease)

    def of_owner(self, owner: str) -> list[LeaseId]:
        """What ends when the owner dies: all its leases but the quarantined ones."""
        return sorted(self._by_owner.get(owner, set()) - self.quarantined)

    def quarantined_uses(self) -> list[Use]:
        return [use for lease in self.quarantined for use in self._by_id[lease].uses]

    def all_uses(self) -> list[Use]:
        return [use for lease in self._by_id.values() for use in lease.uses]

"""What has arrived of one transfer, and what that makes of the next chunk (pure).

A byte counts once it has landed and its chunk's checksum matched. Loss, duplication and reordering of chunks do not matter;
neither does how the sender cuts them, which may change from one connection to the next.
"""

from __future__ import annotations

from typing import Literal

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Area, Ranges, Slab

MAX_ATTEMPTS_PER_CHUNK = 3
MAX_CHANGED = 64  # chunks of one transfer that may come changed
# Of the arrived area, about 300 bytes each. An honest sender's are its layers times the runs of missing objects.
MAX_FRAGMENTS = 1 << 14
Use = Literal["write", "discard"]


class Assembler:
    """The arrived area of one transfer whose `held` objects need not come."""

    def __init__(self, sizes: ObjectSizes, held: Ranges) -> None:
        self.sizes = sizes
        self.held = held
        self.total_bytes = sizes.total_bytes - sizes.bytes_of(held)  # that must come
        self.num_changed = 0
        self.arrived = Area()
        self._attempts: dict[Slab, int] = {}

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - self.arrived.num_bytes

    def use_of(self, slab: Slab) -> Use:
        """Whether a chunk that begins to arrive is written to memory; bytes that count are never written over.

        Raises:
            RemoteProtocolError: it is no part of what must come.
        """
        if not self.sizes.holds(slab):
            raise RemoteProtocolError("range", f"no object of this transfer has {slab}")
        if self.held.touches(slab.first, slab.last):
            raise RemoteProtocolError("range", f"{slab} is of objects that are here already")
        return "discard" if self.arrived.covers(slab) else "write"

    def landed(self, slab: Slab) -> None:
        """A chunk was written, and its checksum matches."""
        self.arrived.add(slab)

    def lost(self, slab: Slab) -> None:
        """A chunk was written in part, over whatever was there."""
        self.arrived.remove(slab)

    def forget(self) -> None:
        """Everything must come again."""
        self.arrived = Area()

    def changed(self, slab: Slab) -> bool:
        """A chunk was written, and its checksum does not match; returns whether to ask for it again."""
        self.lost(slab)
        self.num_changed += 1
        self._attempts[slab] = self._attempts.get(slab, 0) + 1
        return self._attempts[slab] < MAX_ATTEMPTS_PER_CHUNK and self.num_changed < MAX_CHANGED

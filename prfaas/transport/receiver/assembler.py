"""Area of one transfer that has arrived. Pure.

A byte counts once it has been written and the checksum of its chunk matches. Loss, duplication and reordering of
chunks do not matter. The sender may cut the same bytes into other chunks on another connection.
"""

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Area, Ranges, Slab

MAX_ATTEMPTS_PER_CHUNK = 3
MAX_CORRUPT_CHUNKS = 64  # Per transfer.
# Bound on the arrived area. An honest sender causes as many as its layers times the runs of missing objects.
MAX_FRAGMENTS = 1 << 14


class Assembler:
    """Arrived area of one transfer, without the `held` objects, which need not arrive."""

    def __init__(self, sizes: ObjectSizes, held: Ranges) -> None:
        self.sizes = sizes
        self.held = held
        self.total_bytes = sizes.total_bytes - sizes.bytes_of(held)
        self.num_corrupt = 0
        self.arrived = Area()
        self._attempts: dict[Slab, int] = {}

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - self.arrived.num_bytes

    def wants(self, slab: Slab) -> bool:
        """Return whether any byte of a chunk is missing; arrived bytes are never overwritten by complete duplicates.

        Raises:
            RemoteProtocolError: the chunk lies outside the objects that must arrive.
        """
        if not self.sizes.holds(slab):
            raise RemoteProtocolError("range", f"no object of this transfer has {slab}")
        if self.held.touches(slab.first, slab.last):
            raise RemoteProtocolError("range", f"{slab} is part of objects that this side already holds")
        return not self.arrived.covers(slab)

    def reject(self, slab: Slab) -> bool:
        """Discount a chunk with a wrong checksum. Return whether to ask for a retransmission."""
        self.arrived.remove(slab)
        self.num_corrupt += 1
        self._attempts[slab] = self._attempts.get(slab, 0) + 1
        return self._attempts[slab] < MAX_ATTEMPTS_PER_CHUNK and self.num_corrupt < MAX_CORRUPT_CHUNKS

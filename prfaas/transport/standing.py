"""What a HAVE says of a transfer that leaves (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import RemoteProtocolError
from prfaas.transport.area import Area
from prfaas.transport.messages import Have
from prfaas.transport.object_sizes import ObjectSizes
from prfaas.transport.ranges import Ranges

MAX_GAPS = 1 << 18  # between the slabs that have come, times the ranges of objects that the peer does not hold


@dataclass(frozen=True)
class Standing:
    """To be made outside of any lock, as a long HAVE takes a second."""

    held: Ranges
    arrived: Area
    missing_bytes: int  # that must travel, or have

    @staticmethod
    def of(have: Have, sizes: ObjectSizes) -> Standing:
        """Of what has arrived between many held objects some is left out, and comes again.

        Raises:
            RemoteProtocolError: it names what the transfer does not have.
        """
        last_held = have.held.to_list()[-1][1] if len(have.held) else 0
        if last_held > len(sizes) or not all(sizes.holds(slab) for slab in have.arrived):
            raise RemoteProtocolError("range", "HAVE of objects that the transfer does not have")
        arrived = have.arrived[: MAX_GAPS // (1 + len(have.held))]
        return Standing(have.held, Area(arrived), sizes.total_bytes - sizes.bytes_of(have.held))

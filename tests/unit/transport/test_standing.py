"""What a HAVE says of a transfer that leaves."""

from __future__ import annotations

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import Have, ObjectSizes
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.outbound_transfer import MAX_GAPS, PeerState

SIZES = ObjectSizes([(100, 1)])


def test_what_is_held_need_not_travel_and_what_has_arrived_counts_as_missing() -> None:
    standing = PeerState.of(Have(Ranges([(1, 3)]), (Slab(0, 1, 0, 60),)), ObjectSizes([(100, 4)]))
    assert (standing.missing_bytes, standing.arrived.num_bytes) == (200, 60)


def test_what_arrived_between_very_many_held_objects_is_in_part_left_out() -> None:
    num_held, slabs = 1000, tuple(Slab(0, 1, 2 * at, 1) for at in range(1000))
    sizes = ObjectSizes([(2000, 2 * num_held + 1)])
    held = Ranges((1 + 2 * at, 2 + 2 * at) for at in range(num_held))
    standing = PeerState.of(Have(held, slabs), sizes)
    assert tuple(standing.arrived.slabs()) == slabs[: MAX_GAPS // (num_held + 1)]
    assert standing.missing_bytes == 2000 * (num_held + 1)


@pytest.mark.parametrize("have", [Have(Ranges([(0, 2)]), ()), Have(Ranges(), (Slab(0, 1, 50, 51),))])
def test_a_have_of_what_the_transfer_has_not_breaks_the_protocol(have: Have) -> None:
    with pytest.raises(RemoteProtocolError, match="does not have"):
        PeerState.of(have, SIZES)

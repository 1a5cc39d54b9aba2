"""What transfers that arrive may take: of one peer, of all, and what one that ends leaves to the others."""

from __future__ import annotations

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import MAX_RUNS, ObjectSizes
from prfaas.transport.ranges import Area, Slab
from prfaas.transport.receiver.admission import (
    FAIR_PIECES,
    MAX_OPENING_BYTES,
    MAX_STRAYS,
    MAX_TRANSFERS,
    RUN_BYTES,
    STRAYS_SECONDS,
    Admission,
    FragmentQuota,
)
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS

ONE_RUN = ObjectSizes.of([1])
MANY_RUNS = ObjectSizes([(1 + number % 2, 1) for number in range(MAX_RUNS)])
BEHIND = Slab(2 * MAX_FRAGMENTS, 1, 0, 1)  # all that `_scattered` has


def _request(peer: str, *, body: bytes = b"", sizes: ObjectSizes = ONE_RUN) -> OpenRequest:
    return OpenRequest(bytes(16), peer, body, sizes, 60.0)


def _flood(admission: Admission, request: OpenRequest) -> list[FragmentQuota]:
    """As many transfers as find room."""
    admitted = []
    while not admission.objection(request):
        admitted.append(admission.admit(request))
    return admitted


def _scattered(count: int) -> Area:
    """In so many pieces."""
    return Area(Slab(2 * number, 1, 0, 1) for number in range(count))


@pytest.mark.parametrize(
    ("request_of_much", "limit", "amount"),
    [
        (_request("floods"), MAX_TRANSFERS, 1),
        (_request("floods", body=bytes(1 << 20)), MAX_OPENING_BYTES, (1 << 20) + RUN_BYTES),
        (_request("floods", sizes=MANY_RUNS), MAX_OPENING_BYTES, RUN_BYTES * MAX_RUNS),
    ],
    ids=["transfers", "bodies", "runs of sizes"],
)
def test_one_peer_leaves_the_last_quarter_to_others_and_what_ends_makes_room(
    request_of_much: OpenRequest, limit: int, amount: int
) -> None:
    admission = Admission()
    admitted = _flood(admission, request_of_much)
    assert len(admitted) == limit * 3 // 4 // amount
    assert not admission.objection(_request("honest"))
    admission.dismiss(request_of_much, admitted.pop())
    assert not admission.objection(request_of_much)


def test_a_few_pieces_are_for_any_transfer_and_more_while_there_are() -> None:
    admission = Admission(max_pieces=8 * FAIR_PIECES)  # of which one peer has six
    greedy, modest = (admission.admit(_request("peer")) for _ in range(2))
    greedy.recount(_scattered(6 * FAIR_PIECES))
    assert not greedy.has_room(_scattered(6 * FAIR_PIECES), BEHIND)
    few = FAIR_PIECES - _scattered(1).growth(BEHIND)
    modest.recount(_scattered(few))
    assert modest.has_room(_scattered(few), BEHIND)
    modest.recount(_scattered(few + 1))
    assert not modest.has_room(_scattered(few + 1), BEHIND)
    assert modest.refusal().reason == "fragments"
    admission.dismiss(_request("peer"), greedy)
    assert modest.has_room(_scattered(few + 1), BEHIND)


def test_one_transfer_has_its_own_bound_however_much_room_there_is() -> None:
    pieces = Admission().admit(_request("peer"))
    pieces.recount(_scattered(MAX_FRAGMENTS))
    assert not pieces.has_room(_scattered(MAX_FRAGMENTS), BEHIND)


def test_what_is_written_to_an_ended_transfer_takes_no_room_any_more() -> None:
    admission = Admission(max_pieces=8 * FAIR_PIECES)
    ended, other = (admission.admit(_request("peer")) for _ in range(2))
    admission.dismiss(_request("peer"), ended)
    ended.recount(_scattered(6 * FAIR_PIECES))
    other.recount(_scattered(FAIR_PIECES))
    assert other.has_room(_scattered(FAIR_PIECES), BEHIND)


def test_strays_are_bounded_in_each_second() -> None:
    admission = Admission()
    admission.forget_strays(now=0.0)
    for _ in range(MAX_STRAYS * 3 // 4):
        admission.stray("floods")
    with pytest.raises(RemoteProtocolError) as refused:
        admission.stray("floods")
    assert refused.value.reason == "cancels"
    admission.stray("honest")
    admission.forget_strays(now=STRAYS_SECONDS / 2)
    with pytest.raises(RemoteProtocolError):
        admission.stray("floods")
    admission.forget_strays(now=STRAYS_SECONDS)
    admission.stray("floods")

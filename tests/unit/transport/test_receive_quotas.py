"""Quotas of a receiver: shares of single peers, and room that ended transfers give back."""

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import MAX_RUNS, ObjectSizes
from prfaas.transport.ranges import Area, Slab
from prfaas.transport.receiver.admission import (
    FAIR_FRAGMENTS,
    MAX_OPENING_BYTES,
    MAX_STRAY_CANCELS,
    MAX_TRANSFERS,
    RUN_BYTES,
    STRAY_PERIOD_SECONDS,
    Admission,
    EndedTransfers,
    FairQuota,
)
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS

ONE_RUN = ObjectSizes.of([1])
MANY_RUNS = ObjectSizes([(1 + number % 2, 1) for number in range(MAX_RUNS)])
SLAB_BEHIND = Slab(2 * MAX_FRAGMENTS, 1, 0, 1)  # Follows every fragment of `_fragments`.


def _request(peer: str, *, body: bytes = b"", sizes: ObjectSizes = ONE_RUN) -> OpenRequest:
    return OpenRequest(bytes(16), peer, body, sizes, 60.0)


def _fragments(count: int) -> Area:
    return Area(Slab(2 * number, 1, 0, 1) for number in range(count))


def _take_all(quota: FairQuota, peer: str) -> int:
    count = 0
    while quota.has_room(peer):
        quota.change(peer, 1)
        count += 1
    return count


def test_one_peer_leaves_a_quarter_of_a_quota_to_others() -> None:
    quota = FairQuota(100)
    assert not quota.has_room("first", 101) and not quota.has_room("first", 76) and quota.has_room("first", 75)
    assert [_take_all(quota, peer) for peer in ("first", "second", "third")] == [75, 25, 0]


def test_a_peer_that_ends_many_transfers_displaces_only_its_own_outcomes() -> None:
    ended: EndedTransfers[bytes] = EndedTransfers(10)
    ended.put("quiet", b"q", b"done")
    for number in range(100):
        ended.put("busy", bytes([number]), b"error")
    assert ended.get("quiet", b"q") == b"done"
    assert [number for number in range(100) if ended.get("busy", bytes([number]))] == list(range(91, 100))
    assert ended.get("quiet", b"x") is None and ended.get("unknown", b"q") is None


@pytest.mark.parametrize(
    ("request_of_much", "limit", "amount"),
    [
        (_request("greedy"), MAX_TRANSFERS, 1),
        (_request("greedy", body=bytes(1 << 20)), MAX_OPENING_BYTES, (1 << 20) + RUN_BYTES),
        (_request("greedy", sizes=MANY_RUNS), MAX_OPENING_BYTES, RUN_BYTES * MAX_RUNS),
    ],
    ids=["transfers", "bodies", "runs of sizes"],
)
def test_one_peer_leaves_a_quarter_of_all_transfers_to_others(
    request_of_much: OpenRequest, limit: int, amount: int
) -> None:
    admission, admitted = Admission(), []
    while not admission.objection(request_of_much):
        admitted.append(admission.admit(request_of_much))
    assert len(admitted) == limit * 3 // 4 // amount
    assert not admission.objection(_request("honest"))
    admission.release(request_of_much, admitted.pop())
    assert not admission.objection(request_of_much)


def test_every_transfer_may_have_a_few_fragments_and_more_while_there_is_room() -> None:
    admission = Admission(max_fragments=8 * FAIR_FRAGMENTS)  # One peer may have six eighths.
    greedy, modest = (admission.admit(_request("peer")) for _ in range(2))
    greedy.update(_fragments(6 * FAIR_FRAGMENTS))
    assert not greedy.has_room(_fragments(6 * FAIR_FRAGMENTS), SLAB_BEHIND)
    few = FAIR_FRAGMENTS - _fragments(1).growth(SLAB_BEHIND)
    modest.update(_fragments(few))
    modest.check(_fragments(few), SLAB_BEHIND)
    modest.update(_fragments(few + 1))
    with pytest.raises(RemoteProtocolError) as refused:
        modest.check(_fragments(few + 1), SLAB_BEHIND)
    assert refused.value.reason == "fragments"
    admission.release(_request("peer"), greedy)
    modest.check(_fragments(few + 1), SLAB_BEHIND)


def test_cancels_of_unopened_transfers_are_bounded_in_each_second() -> None:
    admission = Admission()
    for _ in range(MAX_STRAY_CANCELS * 3 // 4):
        admission.count_stray_cancel("greedy", now=0.0)
    for now in (0.0, STRAY_PERIOD_SECONDS / 2):
        with pytest.raises(RemoteProtocolError) as refused:
            admission.count_stray_cancel("greedy", now=now)
        assert refused.value.reason == "cancels"
        admission.count_stray_cancel("honest", now=now)
    admission.count_stray_cancel("greedy", now=STRAY_PERIOD_SECONDS)

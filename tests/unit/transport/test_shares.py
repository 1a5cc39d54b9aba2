"""Who may have how much of what is bounded over all peers."""

from __future__ import annotations

from prfaas.transport.receiver.admission import FairQuota


def _take_all(shares: FairQuota, peer: str) -> int:
    """How much one peer gets that asks for ever more."""
    count = 0
    while shares.has_room(peer):
        shares.change(peer, 1)
        count += 1
    return count


def test_one_peer_leaves_a_quarter_to_the_others() -> None:
    shares = FairQuota(100)
    assert [_take_all(shares, peer) for peer in ("first", "second", "third")] == [75, 25, 0]


def test_what_is_given_back_may_be_taken_again() -> None:
    shares = FairQuota(8)
    _take_all(shares, "first")
    shares.change("first", -4)
    assert not shares.has_room("first", 5) and shares.has_room("first", 4)
    assert shares.has_room("second", 4)


def test_no_room_is_left_beyond_the_whole() -> None:
    shares = FairQuota(100)
    assert not shares.has_room("first", 101) and not shares.has_room("first", 76) and shares.has_room("first", 75)

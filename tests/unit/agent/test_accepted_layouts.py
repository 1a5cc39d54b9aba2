"""What a peer's process has accepted is not described to it again; another process is told everything."""

from __future__ import annotations

from prfaas.agent.transfer.layouts import AcceptedLayouts

PEER, RANKS = "west", (b"rank 0", b"rank 1")


def test_what_a_process_has_accepted_is_known_of_it_and_of_no_other() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    assert accepted.knows(PEER, b"first", RANKS)
    assert not accepted.knows(PEER, b"first", (*RANKS, b"rank 2"))
    assert not accepted.knows("north", b"first", RANKS)
    assert not accepted.knows(PEER, b"second", RANKS)


def test_a_peer_without_a_connection_is_told_everything() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    assert not accepted.knows(PEER, None, RANKS)


def test_another_process_ends_what_the_one_before_it_has_accepted() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    accepted.accept(PEER, b"second", RANKS[:1])
    assert accepted.knows(PEER, b"second", RANKS[:1])
    assert not accepted.knows(PEER, b"second", RANKS)
    assert not accepted.knows(PEER, b"first", RANKS)


def test_what_a_peer_has_not_got_any_more_is_described_again() -> None:
    accepted = AcceptedLayouts()
    accepted.forget(PEER, RANKS)
    accepted.accept(PEER, b"first", RANKS)
    accepted.forget(PEER, RANKS[1:])
    assert accepted.knows(PEER, b"first", RANKS[:1])
    assert not accepted.knows(PEER, b"first", RANKS)

"""What a peer's process has accepted is not described to it again; another process is told everything."""

from __future__ import annotations

from prfaas.agent.transfer.layouts import AcceptedLayouts

PEER, RANKS = "west", (b"rank 0", b"rank 1")


def test_accepted_layouts_are_known_for_one_process_of_one_peer() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    assert accepted.knows(PEER, b"first", RANKS)
    assert not accepted.knows(PEER, b"first", (*RANKS, b"rank 2"))
    assert not accepted.knows("north", b"first", RANKS)
    assert not accepted.knows(PEER, b"second", RANKS)


def test_unconnected_peer_gets_every_layout_description() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    assert not accepted.knows(PEER, None, RANKS)


def test_restarted_peer_knows_no_layouts() -> None:
    accepted = AcceptedLayouts()
    accepted.accept(PEER, b"first", RANKS)
    accepted.accept(PEER, b"second", RANKS[:1])
    assert accepted.knows(PEER, b"second", RANKS[:1])
    assert not accepted.knows(PEER, b"second", RANKS)
    assert not accepted.knows(PEER, b"first", RANKS)


def test_dropped_layout_is_described_again() -> None:
    accepted = AcceptedLayouts()
    accepted.forget(PEER, RANKS)
    accepted.accept(PEER, b"first", RANKS)
    accepted.forget(PEER, RANKS[1:])
    assert accepted.knows(PEER, b"first", RANKS[:1])
    assert not accepted.knows(PEER, b"first", RANKS)

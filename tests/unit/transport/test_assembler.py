"""What has arrived of one transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.area import Slab
from prfaas.transport.assembler import MAX_ATTEMPTS_PER_CHUNK, MAX_CHANGED, MAX_FRAGMENTS, Assembler
from prfaas.transport.object_sizes import ObjectSizes
from prfaas.transport.ranges import Ranges

SIZES = ObjectSizes([(100, 4), (50, 2)])


def _assembler() -> Assembler:
    return Assembler(SIZES, Ranges([(1, 2)]))


def test_held_objects_need_not_come() -> None:
    assert _assembler().missing_bytes == 4 * 100 + 2 * 50 - 100


@pytest.mark.parametrize(
    "slab", [Slab(6, 1, 0, 1), Slab(0, 1, 60, 41), Slab(2, 3, 0, 51), Slab(0, 2, 0, 10), Slab(2, 5, 0, 1)]
)
def test_a_slab_beyond_the_objects_or_of_held_ones_breaks_the_protocol(slab: Slab) -> None:
    with pytest.raises(RemoteProtocolError):
        _assembler().use_of(slab)


def test_a_duplicate_is_discarded_so_that_it_cannot_damage_what_counts() -> None:
    assembler = _assembler()
    assembler.landed(Slab(2, 2, 0, 100))
    assert assembler.use_of(Slab(2, 1, 20, 30)) == "discard"
    assert assembler.use_of(Slab(2, 3, 0, 50)) == "write"  # one object of it is missing


def test_a_changed_chunk_takes_back_what_it_has_written_over() -> None:
    assembler = _assembler()
    assembler.landed(Slab(0, 1, 0, 60))
    before = assembler.missing_bytes
    assert assembler.changed(Slab(0, 1, 50, 50))
    assert assembler.missing_bytes == before + 10 and assembler.num_changed == 1


def test_a_chunk_that_keeps_coming_changed_is_given_up() -> None:
    assembler = _assembler()
    again = [assembler.changed(Slab(0, 1, 0, 10)) for _ in range(MAX_ATTEMPTS_PER_CHUNK)]
    assert again == [True] * (MAX_ATTEMPTS_PER_CHUNK - 1) + [False]


def test_an_area_in_too_many_pieces_breaks_the_protocol() -> None:
    assembler = Assembler(ObjectSizes([(4 * MAX_FRAGMENTS, 4)]), Ranges())
    for at in range(MAX_FRAGMENTS):
        slab = Slab(0, 1, 2 * at, 1)
        assert assembler.use_of(slab) == "write"
        assembler.landed(slab)
    assert assembler.num_pieces == MAX_FRAGMENTS
    with pytest.raises(RemoteProtocolError, match="separate pieces"):
        assembler.use_of(Slab(0, 1, 2 * MAX_FRAGMENTS, 1))


def _scattered() -> Assembler:
    """Every second object's first bytes have come: one column of nearly as many pieces as may be."""
    num_objects = 2 * (MAX_FRAGMENTS - 100)
    assembler = Assembler(ObjectSizes([(100, num_objects)]), Ranges())
    for first in range(0, num_objects, 2):
        assembler.landed(Slab(first, 1, 0, 90))
    assert assembler.num_pieces == MAX_FRAGMENTS - 100
    return assembler


CUTS_THE_COLUMN = Slab(0, 2, 10, 20)  # in three, objects and all


def test_a_chunk_that_would_make_it_too_many_pieces_is_refused_before_it_is_written() -> None:
    with pytest.raises(RemoteProtocolError, match="separate pieces"):
        _scattered().use_of(CUTS_THE_COLUMN)


@pytest.mark.parametrize("happens", [Assembler.landed, Assembler.lost, Assembler.changed])
def test_chunks_that_had_begun_before_make_it_no_more_pieces(happens: Callable[[Assembler, Slab], object]) -> None:
    assembler = _scattered()
    happens(assembler, CUTS_THE_COLUMN)
    assert assembler.num_pieces <= 1
    assert assembler.arrived.num_bytes in (0, CUTS_THE_COLUMN.num_bytes), "all else comes again"


def test_a_chunk_that_was_lost_takes_back_what_it_has_written_over() -> None:
    assembler = _assembler()
    assembler.landed(Slab(0, 1, 0, 60))
    before = assembler.missing_bytes
    assembler.lost(Slab(0, 1, 50, 50))
    assert assembler.missing_bytes == before + 10 and assembler.num_changed == 0


def test_a_transfer_of_which_many_chunks_come_changed_is_given_up() -> None:
    assembler = Assembler(ObjectSizes([(MAX_CHANGED, 1)]), Ranges())
    again = [assembler.changed(Slab(0, 1, at, 1)) for at in range(MAX_CHANGED)]
    assert again == [True] * (MAX_CHANGED - 1) + [False]

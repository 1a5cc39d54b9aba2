"""What has arrived of one transfer."""

from __future__ import annotations

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.assembler import MAX_ATTEMPTS_PER_CHUNK, MAX_CHANGED, Assembler

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

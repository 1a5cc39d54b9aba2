"""Arrived area of one transfer."""

from __future__ import annotations

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.assembler import MAX_ATTEMPTS_PER_CHUNK, MAX_CORRUPT_CHUNKS, Assembler

SIZES = ObjectSizes([(100, 4), (50, 2)])


@pytest.fixture
def assembler() -> Assembler:
    return Assembler(SIZES, Ranges([(1, 2)]))


def test_held_objects_need_not_arrive(assembler: Assembler) -> None:
    assert assembler.missing_bytes == 4 * 100 + 2 * 50 - 100


@pytest.mark.parametrize(
    "slab", [Slab(6, 1, 0, 1), Slab(0, 1, 60, 41), Slab(2, 3, 0, 51), Slab(0, 2, 0, 10), Slab(2, 5, 0, 1)]
)
def test_a_chunk_outside_the_missing_objects_breaks_the_protocol(assembler: Assembler, slab: Slab) -> None:
    with pytest.raises(RemoteProtocolError):
        assembler.wants(slab)


def test_a_complete_duplicate_is_not_wanted_so_it_cannot_damage_arrived_bytes(assembler: Assembler) -> None:
    assembler.add(Slab(2, 2, 0, 100))
    assert not assembler.wants(Slab(2, 1, 20, 30))
    assert assembler.wants(Slab(2, 3, 0, 50)), "one of the objects is missing"


def test_a_corrupt_chunk_discounts_the_bytes_that_it_overwrote(assembler: Assembler) -> None:
    assembler.add(Slab(0, 1, 0, 60))
    before = assembler.missing_bytes
    assert assembler.reject(Slab(0, 1, 50, 50))
    assert assembler.missing_bytes == before + 10 and assembler.num_corrupt == 1


def test_a_partly_written_chunk_discounts_the_bytes_that_it_overwrote(assembler: Assembler) -> None:
    assembler.add(Slab(0, 1, 0, 60))
    before = assembler.missing_bytes
    assembler.remove(Slab(0, 1, 50, 50))
    assert assembler.missing_bytes == before + 10 and assembler.num_corrupt == 0


def test_a_chunk_that_stays_corrupt_is_given_up(assembler: Assembler) -> None:
    retries = [assembler.reject(Slab(0, 1, 0, 10)) for _ in range(MAX_ATTEMPTS_PER_CHUNK)]
    assert retries == [True] * (MAX_ATTEMPTS_PER_CHUNK - 1) + [False]


def test_a_transfer_with_many_corrupt_chunks_is_given_up() -> None:
    assembler = Assembler(ObjectSizes([(MAX_CORRUPT_CHUNKS, 1)]), Ranges())
    retries = [assembler.reject(Slab(0, 1, at, 1)) for at in range(MAX_CORRUPT_CHUNKS)]
    assert retries == [True] * (MAX_CORRUPT_CHUNKS - 1) + [False]

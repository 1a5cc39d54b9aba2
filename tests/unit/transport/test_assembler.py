"""Arrived area of one transfer."""

from __future__ import annotations

import pytest

from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.assembler import MAX_CORRUPT_CHUNKS, Assembler

SIZES = ObjectSizes([(100, 4), (50, 2)])


@pytest.fixture
def assembler() -> Assembler:
    return Assembler(SIZES, Ranges([(1, 2)]))


def test_a_partly_written_chunk_discounts_the_bytes_that_it_overwrote(assembler: Assembler) -> None:
    assembler.add(Slab(0, 1, 0, 60))
    before = assembler.missing_bytes
    assembler.remove(Slab(0, 1, 50, 50))
    assert assembler.missing_bytes == before + 10 and assembler.num_corrupt == 0


def test_a_transfer_with_many_corrupt_chunks_is_given_up() -> None:
    assembler = Assembler(ObjectSizes([(MAX_CORRUPT_CHUNKS, 1)]), Ranges())
    retries = [assembler.reject(Slab(0, 1, at, 1)) for at in range(MAX_CORRUPT_CHUNKS)]
    assert retries == [True] * (MAX_CORRUPT_CHUNKS - 1) + [False]

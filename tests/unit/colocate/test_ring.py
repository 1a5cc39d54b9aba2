"""Records come out as they went in, also around the end of the ring and when it is full."""

from __future__ import annotations

import os

import pytest

from prfaas.colocate.processes import ring
from prfaas.colocate.processes.ring import RING_WORDS, RingReader, RingWriter, clear_wakeups


@pytest.fixture
def ends() -> tuple[RingWriter, RingReader, int]:
    memory, event = ring.create(), os.eventfd(0, os.EFD_NONBLOCK)
    return RingWriter(os.dup(memory), event), RingReader(memory), event


def test_records_come_out_in_order_around_the_end_of_the_ring(ends: tuple[RingWriter, RingReader, int]) -> None:
    writer, reader, _ = ends
    body = list(range(RING_WORDS // 3))
    for kind in range(10):
        writer.push(kind, body[kind:])
        assert reader.drain() == [(kind, body[kind:])]


def test_what_does_not_fit_waits_with_the_producer_and_keeps_its_place(
    ends: tuple[RingWriter, RingReader, int],
) -> None:
    writer, reader, _ = ends
    half = [1] * (RING_WORDS // 2)
    for kind in (1, 2, 3):
        writer.push(kind, half)
    assert [kind for kind, _ in reader.drain()] == [1]
    assert not writer.flush()
    assert [kind for kind, _ in reader.drain()] == [2]
    assert writer.flush()
    assert [kind for kind, _ in reader.drain()] == [3]


def test_a_push_wakes_the_consumer_and_the_wakeup_can_be_taken(ends: tuple[RingWriter, RingReader, int]) -> None:
    writer, _, event = ends
    writer.push(1, ())
    assert os.eventfd_read(event) == 1
    clear_wakeups(event)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)

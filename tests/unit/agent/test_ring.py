"""Ring between worker and agent."""

import os
from collections.abc import Iterator

import pytest

from prfaas.agent.engine.ring import RING_ENTRIES, EntryKind, RingEntry, RingReader, RingWriter, create_ring


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    memory, event = create_ring()
    writer, reader = RingWriter(os.dup(memory), os.dup(event)), RingReader(memory, event)
    yield writer, reader
    writer.close()
    reader.close()


def test_entries_arrive_in_order_with_their_time(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    for layer in range(5):
        assert writer.push(
            RingEntry(EntryKind.LAYER_READY, handle=7, group=1, layer=layer, first_block=2, num_blocks=3)
        )
    entries = reader.drain()
    assert [(e.kind, e.handle, e.group, e.layer, e.first_block, e.num_blocks) for e in entries] == [
        (1, 7, 1, layer, 2, 3) for layer in range(5)
    ]
    times = [entry.time_ns for entry in entries]
    assert times == sorted(times) and times[0] > 0
    assert reader.drain() == []


def test_full_ring_refuses_entries_and_loses_none(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    for handle in range(RING_ENTRIES):
        assert writer.push(RingEntry(EntryKind.FORWARD_ENDED, handle=handle))
    assert not writer.push(RingEntry(EntryKind.FORWARD_ENDED, handle=0))
    assert [entry.handle for entry in reader.drain()] == list(range(RING_ENTRIES))
    assert writer.push(RingEntry(EntryKind.FORWARD_ENDED, handle=9))
    assert [entry.handle for entry in reader.drain()] == [9]


def test_positions_wrap_around(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    for counter in range(2):
        writer._counters[counter] = 3 * RING_ENTRIES - 5
    for handle in range(10):
        writer.push(RingEntry(EntryKind.LAYER_READY, handle=handle))
    assert [entry.handle for entry in reader.drain()] == list(range(10))


def test_wrong_producer_counter_costs_at_most_one_ring(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    writer._counters[0] = 1 << 60
    os.eventfd_write(writer.event_fd, 1)
    assert len(reader.drain()) <= RING_ENTRIES

"""Chunks that travel as 8-bit floats, if both ends allow it and the objects are castable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator

import pytest

from prfaas.transport.codec import fp8
from prfaas.transport.protocol.wire import FrameType, packed_header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.api import ReceiveCompleted
from prfaas.transport.sender.api import SendCompleted, SendRequest
from tests.support.raw_peers import RawSender
from tests.support.transport_ends import Far, Near, make_far
from tests.unit.transport.test_packing import bf16

FLOATS = bf16(1 << 16)
OBJECTS = [FLOATS, FLOATS[::-1]]


@pytest.fixture
def lossy_far(nothing_is_left: None) -> Iterator[Far]:
    made = make_far(lossy_fp8=True)
    yield made
    made.receiver.close()


def _sent(far: Far, near: Near) -> tuple[SendCompleted, list[bytes]]:
    """Send both objects, of which only the first is castable."""
    transfer_id = os.urandom(16)
    sizes = [len(item) for item in OBJECTS]
    outgoing = SendRequest(transfer_id, b"", sizes, lambda index: memoryview(OBJECTS[index]), 0, 20.0)
    near.link.open(dataclasses.replace(outgoing, castable=Ranges([(0, 1)])))
    for index, size in enumerate(sizes):
        near.link.ready(transfer_id, first_object=index, num_objects=1, offset_bytes=0, length_bytes=size)
    end = near.assert_completed(transfer_id)
    assert end.stats.checksum_failures == 0
    return end, far.contents(transfer_id)


def test_castable_objects_travel_in_half_the_bytes_and_others_exactly(
    lossy_far: Far, near_to: Callable[..., Near]
) -> None:
    near = near_to(lossy_far.address, lossy_fp8=True)
    end, arrived = _sent(lossy_far, near)
    assert arrived[0] == fp8.restore(fp8.cast(FLOATS) or b"") != FLOATS
    assert arrived[1] == OBJECTS[1]
    assert end.stats.wire_bytes < 1.6 * len(FLOATS)
    assert near.link.snapshot().lossy_fp8


def test_nothing_is_cast_unless_both_ends_allow_it(far: Far, lossy_far: Far, near_to: Callable[..., Near]) -> None:
    for receiving, sends_lossy in ((far, True), (lossy_far, False)):
        near = near_to(receiving.address, lossy_fp8=sends_lossy)
        assert _sent(receiving, near)[1] == OBJECTS
        assert not near.link.snapshot().lossy_fp8


def test_unexpected_lossy_chunk_ends_its_connection(far: Far) -> None:
    payload = fp8.cast(FLOATS)
    assert payload is not None
    with RawSender(far.address) as raw:
        transfer_id = raw.open(len(FLOATS))
        slab = Slab(0, 1, 0, len(FLOATS))
        head = packed_header(transfer_id, slab, 0, packed_bytes=len(payload), kind=FrameType.LOSSY)
        raw.connection.write(head, payload)
        assert raw.refusal().message.startswith("lossy")
    assert far.receiver.refused == {"lossy": 1} and not far.of(ReceiveCompleted)


def test_damaged_lossy_chunk_is_requested_again_and_not_written(
    lossy_far: Far,
) -> None:
    payload = fp8.cast(FLOATS)
    assert payload is not None
    with RawSender(lossy_far.address) as raw:
        transfer_id = raw.open(len(FLOATS))
        slab = Slab(0, 1, 0, len(FLOATS))
        raw.connection.write(
            packed_header(transfer_id, slab, 0, packed_bytes=len(payload), kind=FrameType.LOSSY), payload
        )
        assert raw.heard()[0].type is FrameType.AGAIN
        assert not any(lossy_far.memory[transfer_id][0])

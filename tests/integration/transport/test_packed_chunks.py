"""Packed chunks: a link packs if that pays, and the bytes arrive unchanged."""

from collections.abc import Callable

import pytest

from prfaas.transport.codec.packing import CODECS, Packer, PackFormat
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, chunk_checksum, packed_header
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.api import ReceiveCompleted
from prfaas.transport.sender.api import SendCompleted
from tests.support.raw_peers import RawSender
from tests.support.transport_ends import Far, Near, objects_of, send
from tests.support.waiting import wait_until
from tests.unit.transport.test_packing import bf16

FLOATS = bf16(1 << 16) * 2


def _send_packed(
    raw: RawSender,
    transfer_id: bytes,
    slab: Slab,
    content: bytes,
    *,
    pack_format: PackFormat,
    checksum: int | None = None,
) -> int:
    packed = Packer().pack(content, pack_format)
    assert packed is not None
    right = chunk_checksum(transfer_id, slab, [memoryview(content)])
    head = packed_header(transfer_id, slab, right if checksum is None else checksum, packed_bytes=len(packed))
    raw.connection.write(head, packed)
    return HEADER_BYTES + len(packed)


@pytest.mark.parametrize("codec", CODECS)
def test_packed_chunk_is_written_to_all_its_objects(far: Far, codec: str) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(*[len(FLOATS) // 4] * 4)
        _send_packed(raw, transfer_id, Slab(0, 4, 0, len(FLOATS) // 4), FLOATS, pack_format=PackFormat(codec, 2))
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert b"".join(far.memory[transfer_id]) == FLOATS
    completed = far.of(ReceiveCompleted)[0]
    assert isinstance(completed, ReceiveCompleted) and completed.stats.wire_bytes < len(FLOATS)


def test_damaged_packed_chunk_is_requested_again_and_not_written(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(len(FLOATS))
        slab = Slab(0, 1, 0, len(FLOATS))
        _send_packed(raw, transfer_id, slab, FLOATS, pack_format=PackFormat("lz4", 2), checksum=1)
        assert raw.heard()[0].type is FrameType.AGAIN
        assert not any(far.memory[transfer_id][0])
        _send_packed(raw, transfer_id, slab, FLOATS, pack_format=PackFormat("lz4", 2))
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert bytes(far.memory[transfer_id][0]) == FLOATS


def test_malformed_packed_chunk_ends_its_connection_and_is_counted(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(100)
        noise = objects_of(90)[0]
        raw.connection.write(packed_header(transfer_id, Slab(0, 1, 0, 100), 0, packed_bytes=len(noise)), noise)
        assert raw.refusal().message.startswith("packing")
    assert far.receiver.refused == {"packing": 1}


def test_packed_chunk_beyond_its_object_ends_its_connection(far: Far) -> None:
    with RawSender(far.address) as raw:
        transfer_id = raw.open(len(FLOATS) - 1)
        _send_packed(raw, transfer_id, Slab(0, 1, 0, len(FLOATS)), FLOATS, pack_format=PackFormat("lz4", 2))
        assert raw.refusal().message.startswith("range")


def _saves(near: Near, content: bytes) -> bool:
    """Send a transfer and return whether the link has packed anything by then."""
    transfer_id = send(near, [content] * 8)
    end = near.assert_completed(transfer_id)
    assert end.stats.checksum_failures == 0
    return near.link.snapshot().saved_bytes > 0


def test_full_link_packs_compressible_bytes(far: Far, near_to: Callable[..., Near]) -> None:
    near = near_to(far.address, num_connections=2, budgets=(RateBudget(6e6),))
    wait_until(lambda: _saves(near, FLOATS * 4))
    transfer_id, content = list(far.memory.items())[-1]
    wait_until(lambda: len(far.of(ReceiveCompleted)) == len(far.memory))
    assert all(bytes(item) == FLOATS * 4 for item in content), transfer_id


@pytest.mark.parametrize("config", [{"packs": False}, {}], ids=["not allowed", "noise"])
def test_full_link_sends_bytes_unpacked(far: Far, near_to: Callable[..., Near], config: dict[str, object]) -> None:
    near = near_to(far.address, num_connections=2, budgets=(RateBudget(6e6),), **config)
    content = FLOATS * 4 if config else objects_of(1 << 20)[0]
    assert not _saves(near, content)
    end = near.of(SendCompleted)[0]
    assert isinstance(end, SendCompleted) and end.stats.wire_bytes >= 8 * len(content)

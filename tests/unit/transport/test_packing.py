"""Packed chunks are restored exactly. Malformed chunks are rejected before memory is allocated."""

import random
import struct
import tracemalloc

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import CODECS, PACKED_HEAD_BYTES, Packer, PackFormat, pack_formats, read_head
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES

HEAD = struct.Struct("<IBBH4I")


def bf16(count: int, *, seed: int = 1) -> bytes:
    """Return normally distributed 16-bit floats, as keys and values are."""
    source = random.Random(seed)
    return b"".join(struct.pack("<f", source.gauss(0, 1))[2:] for _ in range(count))


@pytest.mark.parametrize("way", pack_formats(CODECS), ids=str)
@pytest.mark.parametrize("raw", [bytes(8192), bf16(4096), b"abcd" * 999], ids=["zeros", "bf16", "text"])
def test_packed_chunk_unpacks_to_the_same_bytes(way: PackFormat, raw: bytes) -> None:
    packer = Packer()
    packed = packer.pack(raw, way)
    if packed is not None:
        assert len(packed) < len(raw)
        assert bytes(packer.unpack(packed)) == raw


@pytest.mark.parametrize("codec", [name for name in CODECS if name == "zstd"])
def test_exponents_of_16_bit_floats_shrink_and_their_low_bytes_travel_raw(codec: str) -> None:
    raw = bf16(1 << 15)
    packed = Packer().pack(raw, PackFormat(codec, 2))
    assert packed is not None and len(packed) < 0.75 * len(raw)
    assert read_head(packed).plane_bytes[0] == len(raw) // 2
    assert raw[0::2] in packed


@pytest.mark.parametrize("way", pack_formats(CODECS), ids=str)
def test_noise_and_odd_lengths_are_not_packed(way: PackFormat) -> None:
    assert Packer().pack(random.Random(1).randbytes(8192), way) is None
    assert Packer().pack(b"", way) is None
    if way.width > 1:
        assert Packer().pack(bytes(8191), way) is None


@pytest.mark.parametrize(
    "fields",
    [
        (MAX_CHUNK_BYTES + 4, 1, 1, 0, 10, 0, 0, 0),  # Longer than a chunk.
        (0, 1, 1, 0, 10, 0, 0, 0),
        (100, 9, 1, 0, 10, 0, 0, 0),  # Unknown codec.
        (100, 1, 3, 0, 10, 0, 0, 0),  # Three planes.
        (100, 1, 1, 7, 10, 0, 0, 0),
        (100, 1, 1, 0, 10, 5, 0, 0),  # Plane beyond the width.
        (101, 1, 2, 0, 5, 5, 0, 0),  # Uneven planes.
        (100, 1, 2, 0, 60, 0, 0, 0),  # Plane longer than its raw bytes.
        (100, 1, 1, 0, 11, 0, 0, 0),  # Lengths that differ from the frame.
    ],
)
def test_malformed_header_is_rejected(fields: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read_head(HEAD.pack(*fields) + bytes(10))
    assert caught.value.reason == "packing"


@pytest.mark.parametrize("codec", CODECS)
def test_plane_that_unpacks_to_more_than_it_claims_is_rejected(codec: str) -> None:
    packer = Packer()
    packed = packer.pack(bytes(1 << 20), PackFormat(codec, 1))
    assert packed is not None
    planes = packed[PACKED_HEAD_BYTES:]
    bomb = HEAD.pack(len(planes) + 100, {"lz4": 1, "zstd": 2}[codec], 1, 0, len(planes), 0, 0, 0) + planes
    with pytest.raises(RemoteProtocolError):
        packer.unpack(bomb)


@pytest.mark.parametrize("way", pack_formats(CODECS), ids=str)
def test_packing_and_unpacking_need_memory_for_two_more_chunks_at_most(way: PackFormat) -> None:
    packer, raw = Packer(), bf16(1 << 14) * (MAX_CHUNK_BYTES >> 15)
    assert len(raw) == MAX_CHUNK_BYTES
    tracemalloc.start()
    packed = packer.pack(raw, way)
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_CHUNK_BYTES + (1 << 16)
    if packed is not None:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        packer.unpack(packed)
        assert tracemalloc.get_traced_memory()[1] - before < 2 * MAX_CHUNK_BYTES + (1 << 16)
    tracemalloc.stop()

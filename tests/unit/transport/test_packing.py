"""Packed chunks come out as they went in; what is no packed chunk is refused before memory is taken."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import CODECS, PACKED_HEAD_BYTES, Packer, PackFormat, pack_formats, read_head
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES

HEAD = struct.Struct("<IBBH4I")


def bf16(count: int, *, seed: int = 1) -> bytes:
    """Normally distributed 16-bit floats, as keys and values are."""
    source = random.Random(seed)
    return b"".join(struct.pack("<f", source.gauss(0, 1))[2:] for _ in range(count))


@pytest.mark.parametrize("way", pack_formats(CODECS), ids=str)
@pytest.mark.parametrize("raw", [bytes(8192), bf16(4096), b"abcd" * 999], ids=["zeros", "bf16", "text"])
def test_what_is_packed_unpacks_to_the_same_bytes(way: PackFormat, raw: bytes) -> None:
    packer = Packer()
    packed = packer.pack(raw, way)
    if packed is not None:
        assert len(packed) < len(raw)
        assert bytes(packer.unpack(packed)) == raw


@pytest.mark.parametrize("codec", [name for name in CODECS if name == "zstd"])
def test_the_exponents_of_16_bit_floats_shrink_and_their_low_bytes_travel_as_they_are(codec: str) -> None:
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
        (MAX_CHUNK_BYTES + 4, 1, 1, 0, 10, 0, 0, 0),  # more than a chunk
        (0, 1, 1, 0, 10, 0, 0, 0),
        (100, 9, 1, 0, 10, 0, 0, 0),  # an unknown codec
        (100, 1, 3, 0, 10, 0, 0, 0),  # three planes
        (100, 1, 1, 7, 10, 0, 0, 0),
        (100, 1, 1, 0, 10, 5, 0, 0),  # a plane beyond the width
        (101, 1, 2, 0, 5, 5, 0, 0),  # uneven
        (100, 1, 2, 0, 60, 0, 0, 0),  # a plane longer than its bytes
        (100, 1, 1, 0, 11, 0, 0, 0),  # lengths that are not the frame's
    ],
)
def test_a_head_that_cannot_be_is_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read_head(HEAD.pack(*fields) + bytes(10))
    assert caught.value.reason == "packing"


def test_a_frame_that_is_shorter_than_its_head_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        read_head(bytes(PACKED_HEAD_BYTES - 1))


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_planes_are_refused_or_come_out_in_their_length(codec: str) -> None:
    packer, source = Packer(), random.Random(2)
    raw = bytes(4096) + bf16(2048)
    packed = packer.pack(raw, PackFormat(codec, 1)) or packer.pack(raw, PackFormat(codec, 2))
    assert packed is not None
    for _ in range(300):
        damaged = bytearray(packed)
        damaged[source.randrange(PACKED_HEAD_BYTES, len(packed))] ^= 1 << source.randrange(8)
        with contextlib.suppress(RemoteProtocolError):
            assert len(packer.unpack(damaged)) == len(raw)


@pytest.mark.parametrize("codec", CODECS)
def test_a_plane_that_unpacks_to_more_than_it_says_is_refused(codec: str) -> None:
    packer = Packer()
    packed = packer.pack(bytes(1 << 20), PackFormat(codec, 1))
    assert packed is not None
    planes = packed[PACKED_HEAD_BYTES:]
    bomb = HEAD.pack(len(planes) + 100, {"lz4": 1, "zstd": 2}[codec], 1, 0, len(planes), 0, 0, 0) + planes
    with pytest.raises(RemoteProtocolError):
        packer.unpack(bomb)


@pytest.mark.parametrize("way", pack_formats(CODECS), ids=str)
def test_a_chunk_takes_three_of_its_length_at_most_while_it_is_packed_or_unpacked(way: PackFormat) -> None:
    packer, raw = Packer(), bf16(1 << 14) * (MAX_CHUNK_BYTES >> 15)
    assert len(raw) == MAX_CHUNK_BYTES
    tracemalloc.start()
    packed = packer.pack(raw, way)
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_CHUNK_BYTES + (1 << 16), "beyond what is packed"
    if packed is not None:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        packer.unpack(packed)
        assert tracemalloc.get_traced_memory()[1] - before < 2 * MAX_CHUNK_BYTES + (1 << 16), "beyond what came"
    tracemalloc.stop()

"""Frames on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameType, Header, control

frame_types = st.sampled_from(list(FrameType))


@given(
    frame_types, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.data()
)
def test_a_header_comes_back_whole(
    kind: FrameType, transfer_id: bytes, index: int, offset: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, MAX_PAYLOAD_BYTES[kind]))
    header = Header(kind, length, transfer_id, index, offset, checksum=offset ^ 5)
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES == 48
    assert Header.decode(encoded) == header


def test_the_bytes_of_a_chunk_header_are_those_of_the_documented_format() -> None:
    header = Header(FrameType.CHUNK, 5, bytes(range(16)), 7, 9, 11)
    expected = (
        b"PRFS\x01\x07\0\0" + b"\x05\0\0\0" + bytes(range(16)) + b"\x07\0\0\0" + b"\x09" + bytes(7) + b"\x0b" + bytes(7)
    )
    assert header.encode() == expected


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_a_remote_protocol_error(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Header.decode(noise)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", "magic"),
        (4, b"\x02", "version"),
        (5, b"\x63", "type"),
        (6, b"\x01", "version"),
        (8, b"\xff" * 4, "length"),
    ],
)
def test_each_bad_field_is_refused_by_its_name(at: int, value: bytes, reason: str) -> None:
    encoded = bytearray(Header(FrameType.CHUNK, 5).encode())
    encoded[at : at + len(value)] = value
    with pytest.raises(RemoteProtocolError) as caught:
        Header.decode(encoded)
    assert caught.value.reason == reason


def test_a_frame_that_we_would_make_too_long_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="limit"):
        control(FrameType.ERROR, ["x" * MAX_PAYLOAD_BYTES[FrameType.ERROR]])

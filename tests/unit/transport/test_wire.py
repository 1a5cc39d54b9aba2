"""Headers of frames, and the frames that a connection takes in each state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.protocol.wire import (
    HEADER_BYTES,
    MAX_OBJECTS_PER_CHUNK,
    MAX_PAYLOAD_BYTES,
    TRANSITIONS,
    ConnectionState,
    FrameType,
    Header,
    chunk_header,
    control,
)
from prfaas.transport.ranges import Slab

ids = st.binary(min_size=16, max_size=16)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CHUNKS = (FrameType.CHUNK, FrameType.PACKED)
control_types = st.sampled_from([kind for kind in FrameType if kind not in CHUNKS])


@given(control_types, ids, u32, u64, st.data())
def test_a_control_header_is_decoded_as_encoded(
    kind: FrameType, transfer_id: bytes, index: int, offset: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, MAX_PAYLOAD_BYTES[kind]))
    header = Header(kind, length, transfer_id, index, offset, checksum=offset ^ 5)
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES == 48
    assert Header.decode(encoded) == header


@given(ids, u32, st.integers(1, MAX_OBJECTS_PER_CHUNK), st.integers(0, 2**63), st.integers(1, 2048), u64)
def test_a_chunk_header_is_decoded_with_its_slab(
    transfer_id: bytes, first: int, num_objects: int, offset: int, length: int, checksum: int
) -> None:
    slab = Slab(first, num_objects, offset, length)
    header = Header.decode(chunk_header(transfer_id, slab, checksum))
    assert (header.slab, header.transfer_id, header.checksum) == (slab, transfer_id, checksum)


def test_a_chunk_header_has_the_documented_bytes() -> None:
    expected = (b"PRFS\x01\x07\x02\0" + b"\x0a\0\0\0" + bytes(range(16))) + (
        b"\x07\0\0\0" + b"\x09" + bytes(7) + b"\x0b" + bytes(7)
    )
    assert chunk_header(bytes(range(16)), Slab(7, 2, 9, 5), 11) == expected


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", "magic"),
        (4, b"\x02", "version"),
        (5, b"\x63", "type"),
        (5, b"\x0d", "length"),  # PING has no payload.
        (6, b"\0\0", "count"),  # A chunk of no objects.
        (6, b"\x03\0", "count"),  # The payload does not divide by three.
        (6, b"\xff\xff", "count"),
        (8, b"\xff" * 4, "length"),
        (8, b"\0" * 4, "count"),
    ],
)
def test_each_invalid_field_is_refused_by_name(at: int, value: bytes, reason: str) -> None:
    encoded = bytearray(chunk_header(bytes(16), Slab(0, 2, 0, 2), 0))
    encoded[at : at + len(value)] = value
    with pytest.raises(RemoteProtocolError) as caught:
        Header.decode(encoded)
    assert caught.value.reason == reason


def test_a_control_frame_that_counts_objects_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="over 1 objects"):
        Header.decode(Header(FrameType.PING, 0, count=1).encode())


def test_encoding_a_frame_above_its_limit_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="limit"):
        control(FrameType.ERROR, ["x" * MAX_PAYLOAD_BYTES[FrameType.ERROR]])


def test_strangers_cannot_send_frames_of_transfers_or_long_frames() -> None:
    for state in (ConnectionState.AWAITING_HELLO, ConnectionState.AWAITING_PROOF):
        allowed = {event for at, event in TRANSITIONS.transitions if at is state and isinstance(event, FrameType)}
        assert allowed <= {FrameType.HELLO, FrameType.PROOF, FrameType.ERROR}
        assert all(MAX_PAYLOAD_BYTES[frame_type] <= 4096 for frame_type in allowed)

"""Fields of msgpack bodies: each is read as it is, and none of another type or above its length limit is made."""

import tracemalloc
from collections.abc import Callable

import msgpack
import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import Fields, fields_of

MIB = 1 << 20
Read = Callable[[Fields], object]
READS: list[Read] = [
    lambda fields: fields.array(1, 2),
    lambda fields: fields.items(3),
    lambda fields: fields.integer(),
    lambda fields: fields.integers(2),
    lambda fields: fields.real(),
    lambda fields: fields.text(10),
    lambda fields: fields.octets(10),
    lambda fields: fields.exactly(4),
    lambda fields: fields.any(dict, max_bytes=20),
]


def _read(value: object, *reads: Read) -> list[object]:
    with fields_of(msgpack.packb(value), reason="body", what="TEST") as fields:
        return [read(fields) for read in reads]


def test_fields_are_read_in_order() -> None:
    value = [7, [1, 2], 0.5, "text", b"four", {"a": [1]}, [3, 4]]
    reads: list[Read] = [
        lambda fields: fields.array(6, 7),
        lambda fields: fields.integer(),
        lambda fields: fields.integers(2),
        lambda fields: fields.real(),
        lambda fields: fields.text(4),
        lambda fields: fields.exactly(4),
        lambda fields: fields.any(dict, max_bytes=10),
        lambda fields: [fields.integer() for _ in fields.items(2)],
    ]
    assert _read(value, *reads) == [7, 7, (1, 2), 0.5, "text", b"four", {"a": [1]}, [3, 4]]


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (READS[0], [[], [1, 1, 1], {}, {1: 2}, b"\x91\x01", 1, None]),
        (READS[1], [[1, 1, 1, 1], {}, {1: 2}, b"\x91\x01", "x", 1]),
        (READS[2], [-1, 1 << 63, True, 1.0, "1", b"1", [1], None]),
        (READS[3], [[1], [1, 1, 1], [1, True], [1, -1], [1, 1.0], {1: 1}, b"\x05\x06", "ab"]),
        (READS[4], [1, True, "0.5", None]),
        (READS[5], ["x" * 11, b"x", 1, ["x"], None]),
        (READS[6], [b"x" * 11, "x", 1, [1], None]),
        (READS[7], [b"x" * 3, b"x" * 5, "xxxx", 4]),
        (READS[8], [{"x": "x" * 20}, [], 1, None]),
    ],
)
def test_a_field_of_another_type_or_length_is_refused(read: Read, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RemoteProtocolError, match="TEST") as refused:
            _read(value, read)
        assert refused.value.reason == "body"


def test_bytes_after_the_last_field_are_refused() -> None:
    packed = msgpack.packb([1]) + b"\x00"
    with pytest.raises(RemoteProtocolError, match="after"), fields_of(packed, reason="body", what="TEST") as fields:
        assert (fields.array(1), fields.integer()) == (1, 1)
    with fields_of(packed, reason="body", what="TEST", is_beginning=True) as fields:
        assert (fields.array(1), fields.integer()) == (1, 1)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("item", [b"\x80", b"\x91"])
def test_refused_bytes_take_no_more_memory_than_their_copy(read: Read, item: bytes) -> None:
    """Unpacked as a whole, a mebibyte of empty lists or maps would take eighty."""
    packed = b"\xdd" + MIB.to_bytes(4, "big") + item * MIB
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError), fields_of(packed, reason="body", what="TEST") as fields:
        read(fields)
    assert tracemalloc.get_traced_memory()[1] < len(packed) + MIB // 4
    tracemalloc.stop()

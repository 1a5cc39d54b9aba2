"""Reads what a peer packed as msgpack field by field: none is made before its length and its type are known (pure).

Unpacked at once a peer's bytes take up to eighty times their length (an empty map is one byte), and are of any type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import msgpack

from prfaas.errors import RemoteProtocolError

MAX_MESSAGE_CHARACTERS = 500  # of what says why something is refused
_NUMBER_BYTES = 9  # of the longest number: a byte of type and eight of value
_HEAD_BYTES = 5  # of the longest head of a text, a byte string or an array
T = TypeVar("T")


class Fields:
    """The fields of one msgpack value in order. Each call takes the next one.

    All raise ValueError or a msgpack exception where it is of another type, or longer than it may be (see `fields_of`).
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        size = max(1, len(data))
        self._unpacker = msgpack.Unpacker(read_size=size, max_buffer_size=size)
        self._unpacker.feed(data)

    def array(self, *lengths: int) -> int:
        """Enter an array of one of these lengths; which."""
        length: int = self._unpacker.read_array_header()
        if length not in lengths:
            raise ValueError(f"an array of {length} where {' or '.join(map(str, lengths))} are expected")
        return length

    def items(self, most: int) -> range:
        """Enter an array of at most so many items; a turn for each."""
        length: int = self._unpacker.read_array_header()
        if length > most:
            raise ValueError(f"an array of {length}; the limit is {most}")
        return range(length)

    def packed(self, *, max_bytes: int) -> memoryview:
        """Whatever it is, as it came: not unpacked."""
        start: int = self._unpacker.tell()
        self._unpacker.skip()
        end: int = self._unpacker.tell()
        if end - start > max_bytes:
            raise ValueError(f"{end - start} bytes; the limit is {max_bytes}")
        return self._data[start:end]

    def any(self, kind: type[T], *, max_bytes: int) -> T:
        """Whatever it is, of this type; it may take eighty times `max_bytes`, which are those on the wire."""
        value = msgpack.unpackb(self.packed(max_bytes=max_bytes))
        if type(value) is not kind:
            raise ValueError(f"not {kind.__name__}, but {type(value).__name__}")
        return value

    def whole(self) -> int:
        return _whole(self.any(int, max_bytes=_NUMBER_BYTES))

    def wholes(self, count: int) -> tuple[int, ...]:
        """An array of so many whole numbers."""
        numbers = self.any(list, max_bytes=_HEAD_BYTES + count * _NUMBER_BYTES)
        if len(numbers) != count:
            raise ValueError(f"{len(numbers)} numbers where {count} are expected")
        return tuple(map(_whole, numbers))

    def real(self) -> float:
        return self.any(float, max_bytes=_NUMBER_BYTES)

    def text(self, max_bytes: int) -> str:
        value = self.any(str, max_bytes=_HEAD_BYTES + max_bytes)
        _check_length(value.encode(), range(max_bytes + 1))
        return value

    def octets(self, max_bytes: int) -> bytes:
        """A byte string."""
        value = self.any(bytes, max_bytes=_HEAD_BYTES + max_bytes)
        _check_length(value, range(max_bytes + 1))
        return value

    def exactly(self, num_bytes: int) -> bytes:
        """A byte string of this length."""
        value = self.octets(num_bytes)
        _check_length(value, range(num_bytes, num_bytes + 1))
        return value

    def end(self) -> None:
        """Nothing follows."""
        if self._unpacker.tell() != len(self._data):
            raise ValueError("bytes after the last field")


@contextlib.contextmanager
def fields_of(
    data: bytes | bytearray | memoryview, *, reason: str, what: str, is_beginning: bool = False
) -> Iterator[Fields]:
    """The fields of `data`, of which the block takes all; `is_beginning`: more follows, which nobody reads here.

    Raises:
        RemoteProtocolError: they are not what the block expects; `reason` is its, `what` begins its words.
    """
    try:
        fields = Fields(data)
        yield fields
        if not is_beginning:
            fields.end()
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            reason, f"{what}: {str(error) or type(error).__name__}"[:MAX_MESSAGE_CHARACTERS]
        ) from error


def _check_length(value: bytes, allowed: range) -> None:
    if len(value) not in allowed:
        expected = f"{allowed[-1]}" if len(allowed) == 1 else f"{allowed[0]} to {allowed[-1]}"
        raise ValueError(f"{len(value)} bytes where {expected} are expected")


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a whole number")
    return value

"""Reads what a peer packed as msgpack field by field: none is made before its length and its type are known (pure).

Unpacked at once a peer's bytes take up to eighty times their length (an empty map is one byte), and are of any type.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import typing
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.wire import MAX_PAYLOAD_BYTES, NO_TRANSFER, FrameType, Header, control
from prfaas.transport.ranges import Ranges, Slab
from prfaas.types import FailureReason

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


MAX_STRUCTURE_BYTES = 1 << 20
MAX_SLABS = 1 << 12  # of HAVE: what else has arrived comes again
MAX_BODY_BYTES = MAX_PAYLOAD_BYTES[FrameType.OPEN] - MAX_STRUCTURE_BYTES
MAX_NAME_BYTES = 255
MAX_WORDS = 256  # versions, or capabilities, that a HELLO lists
NONCE_BYTES = 32
PROOF_BYTES = 32
_REASONS = frozenset(typing.get_args(FailureReason))
_ONES = re.compile("1+")


@dataclass(frozen=True)
class Hello:
    name: str
    nonce: bytes
    versions: tuple[int, ...]
    capabilities: tuple[str, ...]
    boot_id: bytes = NO_TRANSFER  # of a process that dials to receive; zero: it dials to send


@dataclass(frozen=True)
class Challenge:
    name: str
    nonce: bytes
    version: int
    capabilities: tuple[str, ...]
    boot_id: bytes  # of the listening process: another one knows nothing of earlier opens
    proof: bytes


@dataclass(frozen=True)
class Open:
    sizes: ObjectSizes
    priority: int  # a receiver makes nothing of it; docs/wire-format.md says why it stays
    deadline_seconds: float
    body: bytes


@dataclass(frozen=True)
class Have:
    held: Ranges  # objects
    arrived: tuple[Slab, ...]  # as `Area.slabs` gives them


@dataclass(frozen=True)
class Ending:
    """Why a transfer ends: the body of CANCEL and ERROR."""

    reason: FailureReason
    message: str


@dataclass(frozen=True)
class Done:
    wire_bytes: int
    checksum_failures: int


def encode_hello(hello: Hello) -> bytes:
    """The whole frame."""
    fields: list[Any] = [hello.name, hello.nonce, list(hello.versions), list(hello.capabilities)]
    return control(FrameType.HELLO, [*fields, hello.boot_id] if hello.boot_id != NO_TRANSFER else fields)


def decode_hello(payload: bytes | bytearray) -> Hello:
    with _fields(FrameType.HELLO, payload) as fields:
        receives = fields.array(4, 5) == 5
        name, nonce = _name(fields), fields.exactly(NONCE_BYTES)
        versions = tuple(fields.whole() for _ in fields.items(MAX_WORDS))
        capabilities = _words(fields)
        boot_id = fields.exactly(len(NO_TRANSFER)) if receives else NO_TRANSFER
        return Hello(name, nonce, versions, capabilities, boot_id)


def encode_challenge(challenge: Challenge) -> bytes:
    """The whole frame."""
    fields = [
        challenge.name,
        challenge.nonce,
        challenge.version,
        list(challenge.capabilities),
        challenge.boot_id,
        challenge.proof,
    ]
    return control(FrameType.CHALLENGE, fields)


def decode_challenge(payload: bytes | bytearray) -> Challenge:
    with _fields(FrameType.CHALLENGE, payload) as fields:
        fields.array(6)
        return Challenge(
            _name(fields),
            fields.exactly(NONCE_BYTES),
            fields.whole(),
            _words(fields),
            fields.exactly(len(NO_TRANSFER)),
            fields.exactly(PROOF_BYTES),
        )


def encode_proof(proof: bytes) -> bytes:
    """The whole frame."""
    return control(FrameType.PROOF, [proof])


def decode_proof(payload: bytes | bytearray) -> bytes:
    with _fields(FrameType.PROOF, payload) as fields:
        fields.array(1)
        return fields.exactly(PROOF_BYTES)


def encode_open(transfer_id: bytes, opened: Open) -> bytes:
    """The whole frame."""
    structure = msgpack.packb([[list(run) for run in opened.sizes.runs], opened.priority, opened.deadline_seconds])
    head = Header(FrameType.OPEN, len(structure) + len(opened.body), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, opened.body))


def decode_open(header: Header, payload: bytes | bytearray) -> Open:
    structure, body = _split(header, payload)
    with _fields(FrameType.OPEN, structure) as fields:
        fields.array(3)
        runs = (fields.wholes(2) for _ in fields.items(MAX_RUNS))
        sizes = ObjectSizes((size, count) for size, count in runs)
        priority, deadline_seconds = fields.whole(), fields.real()
        if not 0 < deadline_seconds < float("inf"):
            raise ValueError("the deadline is no time")
        return Open(sizes, priority, deadline_seconds, body)


def encode_have(transfer_id: bytes, have: Have) -> bytes:
    """The whole frame; of MAX_SLABS slabs at most."""
    structure = msgpack.packb([[list(slab) for slab in have.arrived]])
    bits = to_bitmap(have.held)
    head = Header(FrameType.HAVE, len(structure) + len(bits), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, bits))


def decode_have(header: Header, payload: bytes | bytearray, *, num_objects: int) -> Have:
    """`num_objects`: of the transfer. Scattered bits become ranges of 300 times their size: of no others are any made."""
    structure, bits = _split(header, payload)
    if len(bits) > (num_objects + 7) // 8:
        raise RemoteProtocolError("range", "HAVE of objects that the transfer does not have")
    with _fields(FrameType.HAVE, structure) as fields:
        fields.array(1)
        arrived = tuple(Slab(*fields.wholes(4)) for _ in fields.items(MAX_SLABS))
        if not all(slab.num_objects and slab.length for slab in arrived):
            raise ValueError("an empty slab")
        if not all(one.precedes(next_one) for one, next_one in itertools.pairwise(arrived)):
            raise ValueError("slabs that overlap, or are not in the order of their columns")
        return Have(from_bitmap(bits), arrived)


def encode_ending(kind: FrameType, transfer_id: bytes, ending: Ending) -> bytes:
    """The whole frame, CANCEL or ERROR; a long message is cut."""
    return control(kind, [ending.reason, ending.message[:MAX_MESSAGE_CHARACTERS]], transfer_id=transfer_id)


def encode_refusal(error: RemoteProtocolError) -> bytes:
    """The last word on a connection, to a peer that broke the protocol."""
    return encode_ending(FrameType.ERROR, NO_TRANSFER, Ending("protocol", f"{error.reason}: {error}"))


def decode_ending(payload: bytes | bytearray, kind: FrameType = FrameType.ERROR) -> Ending:
    """Of an ERROR, or a CANCEL. A reason that is none of ours reads `protocol`: reasons are labels of metrics."""
    with _fields(kind, payload) as fields:
        fields.array(2)
        reason, message = fields.text(len(payload)), fields.text(len(payload))
        known = typing.cast(FailureReason, reason if reason in _REASONS else "protocol")
        return Ending(known, message[:MAX_MESSAGE_CHARACTERS])


def encode_done(transfer_id: bytes, done: Done) -> bytes:
    """The whole frame."""
    return control(FrameType.DONE, [done.wire_bytes, done.checksum_failures], transfer_id=transfer_id)


def decode_done(payload: bytes | bytearray) -> Done:
    with _fields(FrameType.DONE, payload) as fields:
        return Done(*fields.wholes(2))


def to_bitmap(objects: Ranges) -> bytes:
    """Bit i (of byte i // 8, lowest first) stands for object i; zeros at the end are left out."""
    spans = objects.to_list()
    bits = bytearray((spans[-1][1] + 7) // 8 if spans else 0)
    for first, last in spans:
        head, tail = first // 8, (last - 1) // 8
        head_bits, tail_bits = 0xFF << first % 8 & 0xFF, 0xFF >> 7 - (last - 1) % 8
        if head == tail:
            bits[head] |= head_bits & tail_bits
        else:
            bits[head] |= head_bits
            bits[head + 1 : tail] = b"\xff" * (tail - head - 1)
            bits[tail] |= tail_bits
    return bytes(bits)


def from_bitmap(bits: bytes) -> Ranges:
    """The inverse of `to_bitmap`."""
    text = format(int.from_bytes(bits, "little"), "b")[::-1]
    return Ranges(match.span() for match in _ONES.finditer(text))


def _split(header: Header, payload: bytes | bytearray) -> tuple[memoryview, bytes]:
    if header.offset > min(len(payload), MAX_STRUCTURE_BYTES):
        raise RemoteProtocolError("body", f"{header.type.name}: its first part is longer than allowed")
    whole = memoryview(payload)
    return whole[: header.offset], bytes(whole[header.offset :])


def _fields(
    kind: FrameType, payload: bytes | bytearray | memoryview
) -> contextlib.AbstractContextManager[Fields, bool | None]:
    return fields_of(payload, reason="body", what=kind.name)


def _name(fields: Fields) -> str:
    name = fields.text(MAX_NAME_BYTES)
    if not name:
        raise ValueError("nobody has no name")
    return name


def _words(fields: Fields) -> tuple[str, ...]:
    return tuple(fields.text(MAX_NAME_BYTES) for _ in fields.items(MAX_WORDS))


MAX_OBJECTS = 1 << 21  # 1M tokens in blocks of 16, 8 ranks, 4 groups; as a bitmap 256 KiB
MAX_OBJECT_BYTES = 1 << 32
MAX_RUNS = 1 << 12  # about 200 bytes each; an honest sender's are its KV groups times its ranks


class ObjectSizes(Sequence[int]):
    """Sizes in bytes, by object index."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """`runs` are (size, count); neighbours of one size become one.

        Raises:
            ValueError: a size or the number of objects is out of bounds.
        """
        alike = itertools.groupby(runs, key=lambda run: run[0])
        self.runs: list[tuple[int, int]] = [(size, sum(count for _, count in its)) for size, its in alike]
        if not all(0 < size <= MAX_OBJECT_BYTES and 0 < count <= MAX_OBJECTS for size, count in self.runs):
            raise ValueError("an object of no bytes, or of too many")
        self._lasts = list(itertools.accumulate(count for _, count in self.runs))
        if len(self) > MAX_OBJECTS or len(self.runs) > MAX_RUNS:
            raise ValueError(f"{len(self)} objects in {len(self.runs)} runs; limits are {MAX_OBJECTS} and {MAX_RUNS}")
        self.total_bytes = sum(size * count for size, count in self.runs)

    @staticmethod
    def of(sizes: Sequence[int]) -> ObjectSizes:
        """The runs of plain sizes."""
        if isinstance(sizes, ObjectSizes):
            return sizes
        return ObjectSizes((size, len(list(same))) for size, same in itertools.groupby(sizes))

    def __len__(self) -> int:
        return self._lasts[-1] if self._lasts else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.runs[bisect_right(self._lasts, index)][0]

    def holds(self, slab: Slab) -> bool:
        """Whether every object of a slab exists and has its bytes."""
        if slab.last > len(self):
            return False
        at = bisect_right(self._lasts, slab.first)
        while self.runs[at][0] >= slab.end:
            if self._lasts[at] >= slab.last:
                return True
            at += 1
        return False

    def bytes_of(self, objects: Ranges) -> int:
        """Total size of the objects in `objects`."""
        total = 0
        for first, last in objects.to_list():
            while first < last:
                at = bisect_right(self._lasts, first)
                upto = min(last, self._lasts[at])
                total += self.runs[at][0] * (upto - first)
                first = upto
        return total

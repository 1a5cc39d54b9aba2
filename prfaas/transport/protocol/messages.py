"""Bodies of control frames, read field by field with bounded memory. Pure.

A peer's bytes are never unpacked all at once: that can take eighty times their length, as an empty map is one byte.
Each field is made only after its type and length are known.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import typing
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.wire import MAX_PAYLOAD_BYTES, NO_TRANSFER, FrameType, Header, control
from prfaas.transport.ranges import Ranges, Slab
from prfaas.types import FailureReason

MAX_CANCELS = 4096  # CANCELs per peer that a sender keeps for repetition.
MAX_MESSAGE_CHARACTERS = 500  # Of the message of an ERROR or CANCEL.
MAX_OBJECTS = 1 << 21  # 1M tokens in blocks of 16, 8 ranks, 4 groups. As a bitmap 256 KiB.
MAX_OBJECT_BYTES = 1 << 32
MAX_RUNS = 1 << 12  # About 200 bytes each. An honest sender has as many as KV groups times ranks.
MAX_STRUCTURE_BYTES = 1 << 20
MAX_SLABS = 1 << 12  # Per HAVE. Bytes that have arrived but are not listed are sent again.
MAX_BODY_BYTES = MAX_PAYLOAD_BYTES[FrameType.OPEN] - MAX_STRUCTURE_BYTES
MAX_NAME_BYTES = 255
MAX_WORDS = 256  # Versions or capabilities in a HELLO.
NONCE_BYTES = 32
PROOF_BYTES = 32
_REASONS = frozenset(typing.get_args(FailureReason))
_ONES = re.compile("1+")
_NUMBER_BYTES = 9  # Longest packed number: a type byte and eight value bytes.
_HEAD_BYTES = 5  # Longest packed head of a text, byte string or array.
T = TypeVar("T")


class Fields:
    """Fields of one msgpack value. Each call reads the next one.

    A field of another type or above its length limit raises ValueError or a msgpack exception (see `fields_of`).
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        size = max(1, len(data))
        self._unpacker = msgpack.Unpacker(read_size=size, max_buffer_size=size)
        self._unpacker.feed(data)

    def array(self, *lengths: int) -> int:
        """Enter an array of one of these lengths, and return the length."""
        length: int = self._unpacker.read_array_header()
        if length not in lengths:
            raise ValueError(f"an array of {length} where {' or '.join(map(str, lengths))} are expected")
        return length

    def items(self, max_items: int) -> range:
        """Enter an array of at most so many items, and return a range over them."""
        length: int = self._unpacker.read_array_header()
        if length > max_items:
            raise ValueError(f"an array of {length}; the limit is {max_items}")
        return range(length)

    def packed(self, *, max_bytes: int) -> memoryview:
        """Return the bytes of any field, not unpacked."""
        start: int = self._unpacker.tell()
        self._unpacker.skip()
        end: int = self._unpacker.tell()
        if end - start > max_bytes:
            raise ValueError(f"{end - start} bytes; the limit is {max_bytes}")
        return self._data[start:end]

    def any(self, kind: type[T], *, max_bytes: int) -> T:
        """Return a field of this type. `max_bytes` bounds its packed length; in memory it may take eighty times as much."""
        value = msgpack.unpackb(self.packed(max_bytes=max_bytes))
        if type(value) is not kind:
            raise ValueError(f"not {kind.__name__}, but {type(value).__name__}")
        return value

    def integer(self) -> int:
        return _integer(self.any(int, max_bytes=_NUMBER_BYTES))

    def integers(self, count: int) -> tuple[int, ...]:
        """Return an array of `count` integers of at least 0."""
        numbers = self.any(list, max_bytes=_HEAD_BYTES + count * _NUMBER_BYTES)
        if len(numbers) != count:
            raise ValueError(f"{len(numbers)} numbers where {count} are expected")
        return tuple(map(_integer, numbers))

    def real(self) -> float:
        return self.any(float, max_bytes=_NUMBER_BYTES)

    def text(self, max_bytes: int) -> str:
        value = self.any(str, max_bytes=_HEAD_BYTES + max_bytes)
        _check_length(value.encode(), range(max_bytes + 1))
        return value

    def octets(self, max_bytes: int) -> bytes:
        """Return a byte string."""
        value = self.any(bytes, max_bytes=_HEAD_BYTES + max_bytes)
        _check_length(value, range(max_bytes + 1))
        return value

    def exactly(self, num_bytes: int) -> bytes:
        """Return a byte string of this length."""
        value = self.octets(num_bytes)
        _check_length(value, range(num_bytes, num_bytes + 1))
        return value

    def end(self) -> None:
        """Check that nothing follows."""
        if self._unpacker.tell() != len(self._data):
            raise ValueError("bytes after the last field")


@contextlib.contextmanager
def fields_of(
    data: bytes | bytearray | memoryview, *, reason: str, what: str, is_beginning: bool = False
) -> Iterator[Fields]:
    """Provide the fields of `data` to the block, which must read all of them unless `is_beginning` is true.

    Raises:
        RemoteProtocolError: the fields are not what the block expects. It has this `reason`; `what` begins its message.
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


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not an integer from 0 to 2**63 - 1")
    return value


class ObjectSizes(Sequence[int]):
    """Sizes of a transfer's objects in bytes, as runs of equal sizes, so a short message cannot claim much memory."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """Take runs of (size, count); neighbours of equal size are merged.

        Raises:
            ValueError: a size or the number of objects is out of bounds.
        """
        equal = itertools.groupby(runs, key=lambda run: run[0])
        self.runs: list[tuple[int, int]] = [(size, sum(count for _, count in group)) for size, group in equal]
        if not all(0 < size <= MAX_OBJECT_BYTES and 0 < count <= MAX_OBJECTS for size, count in self.runs):
            raise ValueError(f"object sizes must be 1 to {MAX_OBJECT_BYTES} bytes, and runs 1 to {MAX_OBJECTS} objects")
        self._lasts = list(itertools.accumulate(count for _, count in self.runs))
        if len(self) > MAX_OBJECTS or len(self.runs) > MAX_RUNS:
            raise ValueError(f"{len(self)} objects in {len(self.runs)} runs; limits are {MAX_OBJECTS} and {MAX_RUNS}")
        self.total_bytes = sum(size * count for size, count in self.runs)

    @staticmethod
    def of(sizes: Sequence[int]) -> ObjectSizes:
        """Return the runs of plain sizes."""
        if isinstance(sizes, ObjectSizes):
            return sizes
        return ObjectSizes((size, len(list(same))) for size, same in itertools.groupby(sizes))

    def __len__(self) -> int:
        return self._lasts[-1] if self._lasts else 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # Nobody slices sizes.
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.runs[bisect_right(self._lasts, index)][0]

    def holds(self, slab: Slab) -> bool:
        """Return whether every object of a slab exists and has its bytes."""
        if slab.last > len(self):
            return False
        at = bisect_right(self._lasts, slab.first)
        while self.runs[at][0] >= slab.end:
            if self._lasts[at] >= slab.last:
                return True
            at += 1
        return False

    def bytes_of(self, objects: Ranges) -> int:
        """Return the total size of these objects."""
        total = 0
        for first, last in objects.to_list():
            while first < last:
                at = bisect_right(self._lasts, first)
                upto = min(last, self._lasts[at])
                total += self.runs[at][0] * (upto - first)
                first = upto
        return total


@dataclass(frozen=True)
class Hello:
    """First frame of a dialler."""

    name: str
    nonce: bytes
    versions: tuple[int, ...]
    capabilities: tuple[str, ...]
    boot_id: bytes = NO_TRANSFER  # Set by a process that dials to receive; zero when it dials to send.


@dataclass(frozen=True)
class Challenge:
    """Answer of a listener to HELLO."""

    name: str
    nonce: bytes
    version: int
    capabilities: tuple[str, ...]
    boot_id: bytes  # Of the listening process. Another process knows nothing of earlier OPENs.
    proof: bytes


@dataclass(frozen=True)
class Open:
    """Offer of a transfer."""

    sizes: ObjectSizes
    priority: int  # Ignored by receivers.
    deadline_seconds: float
    body: bytes


@dataclass(frozen=True)
class Have:
    """Objects and slabs that the receiver has."""

    held: Ranges
    arrived: tuple[Slab, ...]  # In the order of `Area.slabs`.


@dataclass(frozen=True)
class EndReason:
    """Reason why a transfer ends: the body of CANCEL and ERROR."""

    reason: FailureReason
    message: str


@dataclass(frozen=True)
class TransferStats:
    """Bytes and checksum failures of one transfer on the wire: the body of DONE."""

    wire_bytes: int
    checksum_failures: int


def encode_hello(hello: Hello) -> bytes:
    fields: list[Any] = [hello.name, hello.nonce, list(hello.versions), list(hello.capabilities)]
    return control(FrameType.HELLO, [*fields, hello.boot_id] if hello.boot_id != NO_TRANSFER else fields)


def decode_hello(payload: bytes | bytearray) -> Hello:
    with _fields(FrameType.HELLO, payload) as fields:
        receives = fields.array(4, 5) == 5
        name, nonce = _name(fields), fields.exactly(NONCE_BYTES)
        versions = tuple(fields.integer() for _ in fields.items(MAX_WORDS))
        capabilities = _words(fields)
        boot_id = fields.exactly(len(NO_TRANSFER)) if receives else NO_TRANSFER
        return Hello(name, nonce, versions, capabilities, boot_id)


def encode_challenge(challenge: Challenge) -> bytes:
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
            fields.integer(),
            _words(fields),
            fields.exactly(len(NO_TRANSFER)),
            fields.exactly(PROOF_BYTES),
        )


def encode_proof(proof: bytes) -> bytes:
    return control(FrameType.PROOF, [proof])


def decode_proof(payload: bytes | bytearray) -> bytes:
    with _fields(FrameType.PROOF, payload) as fields:
        fields.array(1)
        return fields.exactly(PROOF_BYTES)


def encode_open(transfer_id: bytes, opened: Open) -> bytes:
    structure = msgpack.packb([[list(run) for run in opened.sizes.runs], opened.priority, opened.deadline_seconds])
    head = Header(FrameType.OPEN, len(structure) + len(opened.body), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, opened.body))


def decode_open(header: Header, payload: bytes | bytearray) -> Open:
    structure, body = _split(header, payload)
    with _fields(FrameType.OPEN, structure) as fields:
        fields.array(3)
        runs = (fields.integers(2) for _ in fields.items(MAX_RUNS))
        sizes = ObjectSizes((size, count) for size, count in runs)
        priority, deadline_seconds = fields.integer(), fields.real()
        if not 0 < deadline_seconds < float("inf"):
            raise ValueError("deadline_seconds must be finite and above 0")
        return Open(sizes, priority, deadline_seconds, body)


def encode_have(transfer_id: bytes, have: Have) -> bytes:
    """Encode a HAVE of at most MAX_SLABS slabs."""
    structure = msgpack.packb([[list(slab) for slab in have.arrived]])
    bits = to_bitmap(have.held)
    head = Header(FrameType.HAVE, len(structure) + len(bits), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, bits))


def decode_have(header: Header, payload: bytes | bytearray, *, num_objects: int) -> Have:
    """Decode a HAVE of a transfer with this many objects. Bits beyond them are refused, as each may take 40 bytes."""
    structure, bits = _split(header, payload)
    if len(bits) > (num_objects + 7) // 8:
        raise RemoteProtocolError("range", "HAVE lists objects that the transfer does not have")
    with _fields(FrameType.HAVE, structure) as fields:
        fields.array(1)
        arrived = tuple(Slab(*fields.integers(4)) for _ in fields.items(MAX_SLABS))
        if not all(slab.num_objects and slab.length for slab in arrived):
            raise ValueError("an empty slab")
        if not all(slab.precedes(following) for slab, following in itertools.pairwise(arrived)):
            raise ValueError("slabs that overlap, or are not in the order of their columns")
        return Have(from_bitmap(bits), arrived)


def encode_ending(kind: FrameType, transfer_id: bytes, ending: EndReason) -> bytes:
    """Encode a CANCEL or ERROR; a long message is cut."""
    return control(kind, [ending.reason, ending.message[:MAX_MESSAGE_CHARACTERS]], transfer_id=transfer_id)


def encode_refusal(error: RemoteProtocolError) -> bytes:
    """Encode the ERROR that ends the connection of a peer that broke the protocol."""
    return encode_ending(FrameType.ERROR, NO_TRANSFER, EndReason("protocol", f"{error.reason}: {error}"))


def decode_ending(payload: bytes | bytearray, kind: FrameType = FrameType.ERROR) -> EndReason:
    """Decode an ERROR or CANCEL. Unknown reasons map to `protocol`, because reasons are labels of metrics."""
    with _fields(kind, payload) as fields:
        fields.array(2)
        reason, message = fields.text(len(payload)), fields.text(len(payload))
        known = typing.cast(FailureReason, reason if reason in _REASONS else "protocol")
        return EndReason(known, message[:MAX_MESSAGE_CHARACTERS])


def encode_done(transfer_id: bytes, stats: TransferStats) -> bytes:
    return control(FrameType.DONE, [stats.wire_bytes, stats.checksum_failures], transfer_id=transfer_id)


def decode_done(payload: bytes | bytearray) -> TransferStats:
    with _fields(FrameType.DONE, payload) as fields:
        return TransferStats(*fields.integers(2))


def to_bitmap(objects: Ranges) -> bytes:
    """Return a bitmap in which bit i (of byte i // 8, lowest first) stands for object i, without trailing zeros."""
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
    """Return the objects of a bitmap."""
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
        raise ValueError("the name is empty")
    return name


def _words(fields: Fields) -> tuple[str, ...]:
    return tuple(fields.text(MAX_NAME_BYTES) for _ in fields.items(MAX_WORDS))

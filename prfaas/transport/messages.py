"""The bodies of control frames as plain data, checked field by field as they come in (pure).

OPEN and HAVE carry one long opaque part (the caller's body, a bitmap of objects) behind their msgpack part, whose length
stands in the header's `offset`; so no msgpack structure from a peer is longer than MAX_STRUCTURE_BYTES.
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.area import Slab
from prfaas.transport.object_sizes import MAX_OBJECTS, MAX_RUNS, ObjectSizes
from prfaas.transport.ranges import Ranges
from prfaas.transport.wire import MAX_PAYLOAD_BYTES, NO_TRANSFER, FrameType, Header, control
from prfaas.types import FailureReason

MAX_STRUCTURE_BYTES = 1 << 20
MAX_SLABS = 1 << 12  # of HAVE: what else has arrived comes again
MAX_BODY_BYTES = MAX_PAYLOAD_BYTES[FrameType.OPEN] - MAX_STRUCTURE_BYTES
MAX_NAME_BYTES = 255
MAX_MESSAGE_CHARACTERS = 500
NONCE_BYTES = 32
PROOF_BYTES = 32
_REASONS = frozenset(typing.get_args(FailureReason))
_ONES = re.compile("1+")
T = TypeVar("T")


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
    priority: int
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
    def read(name: Any, nonce: Any, versions: Any, capabilities: Any, boot_id: Any = NO_TRANSFER) -> Hello:
        return Hello(
            _name(name),
            _exactly(nonce, NONCE_BYTES),
            _numbers(versions),
            _words(capabilities),
            _exactly(boot_id, len(NO_TRANSFER)),
        )

    return _decode(FrameType.HELLO, payload, read)


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
    def read(name: Any, nonce: Any, version: Any, capabilities: Any, boot_id: Any, proof: Any) -> Challenge:
        return Challenge(
            _name(name),
            _exactly(nonce, NONCE_BYTES),
            _whole(version),
            _words(capabilities),
            _exactly(boot_id, len(NO_TRANSFER)),
            _exactly(proof, PROOF_BYTES),
        )

    return _decode(FrameType.CHALLENGE, payload, read)


def encode_proof(proof: bytes) -> bytes:
    """The whole frame."""
    return control(FrameType.PROOF, [proof])


def decode_proof(payload: bytes | bytearray) -> bytes:
    return _decode(FrameType.PROOF, payload, lambda proof: _exactly(proof, PROOF_BYTES))


def encode_open(transfer_id: bytes, opened: Open) -> bytes:
    """The whole frame."""
    structure = msgpack.packb([[list(run) for run in opened.sizes.runs], opened.priority, opened.deadline_seconds])
    head = Header(FrameType.OPEN, len(structure) + len(opened.body), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, opened.body))


def decode_open(header: Header, payload: bytes | bytearray) -> Open:
    structure, body = _split(header, payload)

    def read(runs: Any, priority: Any, deadline_seconds: Any) -> Open:
        sizes = ObjectSizes((_whole(size), _whole(count)) for size, count in runs)
        if not isinstance(deadline_seconds, float) or not 0 < deadline_seconds < float("inf"):
            raise ValueError("the deadline is no time")
        return Open(sizes, _whole(priority), deadline_seconds, body)

    return _decode(FrameType.OPEN, structure, read, max_items=MAX_RUNS)


def encode_have(transfer_id: bytes, have: Have) -> bytes:
    """The whole frame. What of `arrived` is beyond MAX_SLABS is left out."""
    structure = msgpack.packb([[list(slab) for slab in have.arrived[:MAX_SLABS]]])
    bits = to_bitmap(have.held)
    head = Header(FrameType.HAVE, len(structure) + len(bits), transfer_id, offset=len(structure))
    return b"".join((head.encode(), structure, bits))


def decode_have(header: Header, payload: bytes | bytearray) -> Have:
    structure, bits = _split(header, payload)
    if len(bits) > MAX_OBJECTS // 8:  # scattered bits become ranges of 300 times their size
        raise RemoteProtocolError("body", f"HAVE: more than {MAX_OBJECTS} objects")

    def read(slabs: Any) -> Have:
        arrived = tuple(Slab(*map(_whole, slab)) for slab in itertools.islice(slabs, MAX_SLABS))
        if not all(slab.num_objects and slab.length for slab in arrived):
            raise ValueError("an empty slab")
        if not all(one.precedes(next_one) for one, next_one in itertools.pairwise(arrived)):
            raise ValueError("slabs that overlap, or are not in the order of their columns")
        return Have(from_bitmap(bits), arrived)

    return _decode(FrameType.HAVE, structure, read)


def encode_ending(kind: FrameType, transfer_id: bytes, ending: Ending) -> bytes:
    """The whole frame, CANCEL or ERROR; a long message is cut."""
    return control(kind, [ending.reason, ending.message[:MAX_MESSAGE_CHARACTERS]], transfer_id=transfer_id)


def encode_refusal(error: RemoteProtocolError) -> bytes:
    """The last word on a connection, to a peer that broke the protocol."""
    return encode_ending(FrameType.ERROR, NO_TRANSFER, Ending("protocol", f"{error.reason}: {error}"))


def decode_ending(payload: bytes | bytearray) -> Ending:
    """A reason that is none of ours reads `protocol`: reasons are labels of metrics."""

    def read(reason: Any, message: Any) -> Ending:
        known = typing.cast(FailureReason, reason if reason in _REASONS else "protocol")
        if not isinstance(message, str):
            raise ValueError("not a message")
        return Ending(known, message[:MAX_MESSAGE_CHARACTERS])

    return _decode(FrameType.ERROR, payload, read)


def encode_done(transfer_id: bytes, done: Done) -> bytes:
    """The whole frame."""
    return control(FrameType.DONE, [done.wire_bytes, done.checksum_failures], transfer_id=transfer_id)


def decode_done(payload: bytes | bytearray) -> Done:
    return _decode(FrameType.DONE, payload, lambda wire, failures: Done(_whole(wire), _whole(failures)))


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


def _split(header: Header, payload: bytes | bytearray) -> tuple[bytes, bytes]:
    if header.offset > min(len(payload), MAX_STRUCTURE_BYTES):
        raise RemoteProtocolError("body", f"{header.type.name}: its first part is longer than allowed")
    whole = memoryview(payload)
    return bytes(whole[: header.offset]), bytes(whole[header.offset :])


def _decode(
    kind: FrameType, payload: bytes | bytearray, read: Callable[..., T], *, max_items: int = MAX_STRUCTURE_BYTES
) -> T:
    """What `read` makes of an array's items; none of its arrays may be longer than `max_items`."""
    try:
        return read(*msgpack.unpackb(payload, max_array_len=max_items))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("body", f"{kind.name}: {error!r}"[:MAX_MESSAGE_CHARACTERS]) from error


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= MAX_NAME_BYTES:
        raise ValueError("not a name")
    return value


def _exactly(value: Any, num_bytes: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != num_bytes:
        raise ValueError(f"not {num_bytes} bytes")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a whole number")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(_whole, value))


def _words(value: Any) -> tuple[str, ...]:
    if not all(isinstance(word, str) for word in value):
        raise ValueError("not words")
    return tuple(value)

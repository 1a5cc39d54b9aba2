"""The bodies of control frames as plain data, checked field by field as they come in (pure).

OPEN and HAVE carry one long opaque part (the caller's body, a bitmap of objects) behind their msgpack part, whose length
stands in the header's `offset`; no first part is longer than MAX_STRUCTURE_BYTES.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import typing
from dataclasses import dataclass
from typing import Any

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.area import Slab
from prfaas.transport.fields import MAX_MESSAGE_CHARACTERS, Fields, fields_of
from prfaas.transport.object_sizes import MAX_RUNS, ObjectSizes
from prfaas.transport.ranges import Ranges
from prfaas.transport.wire import MAX_PAYLOAD_BYTES, NO_TRANSFER, FrameType, Header, control
from prfaas.types import FailureReason

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

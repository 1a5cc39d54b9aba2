"""A sender written from docs/wire-format.md alone is served."""

import hashlib
import hmac
import os
import socket
import struct
from typing import Any

import msgpack
import xxhash

from prfaas.transport.receiver.api import ReceiveCompleted
from tests.support.transport_ends import KEY, Far
from tests.support.waiting import PATIENCE_SECONDS, wait_until

HEADER = struct.Struct("<4sBBHI16sIQQ")
HELLO, CHALLENGE, PROOF, WELCOME, OPEN, HAVE, CHUNK, ACK, DONE, ERROR, END = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15
NOBODY = bytes(16)


def _frame(kind: int, payload: bytes = b"", *, transfer_id: bytes = NOBODY, offset: int = 0) -> bytes:
    return HEADER.pack(b"PRFS", 1, kind, 0, len(payload), transfer_id, 0, offset, 0) + payload


def _heard(peer: socket.socket) -> tuple[int, int, bytes]:
    """Return type, offset and payload of the next frame."""
    *_, kind, _, length, _, _, offset, _ = HEADER.unpack(_exactly(peer, HEADER.size))
    return kind, offset, _exactly(peer, length)


def _exactly(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = peer.recv(count - len(received))
        assert part, "the receiver has closed the connection"
        received += part
    return received


def _dialled(far: Far) -> socket.socket:
    host, _, port = far.address.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    nonce = os.urandom(32)
    peer.sendall(_frame(HELLO, msgpack.packb(["by the book", nonce, [1], []])))
    kind, _, payload = _heard(peer)
    name, far_nonce, version, capabilities, boot_id, proof = msgpack.unpackb(payload)
    assert (kind, name, version, capabilities) == (CHALLENGE, "far", 1, [])
    signed: list[Any] = [["by the book", nonce, [1], [], NOBODY], [name, far_nonce, version, capabilities, boot_id]]
    transcript = msgpack.packb(signed)
    assert proof == hmac.digest(KEY, b"listener" + transcript, hashlib.sha256)
    peer.sendall(_frame(PROOF, msgpack.packb([hmac.digest(KEY, b"dialer" + transcript, hashlib.sha256)])))
    assert _heard(peer)[0] == WELCOME
    return peer


def _open(peer: socket.socket, transfer_id: bytes) -> None:
    """Two objects of 100 bytes."""
    first = msgpack.packb([[[100, 2]], 0, PATIENCE_SECONDS])
    peer.sendall(_frame(OPEN, first + b"the agents' own", transfer_id=transfer_id, offset=len(first)))
    kind, offset, payload = _heard(peer)
    assert (kind, msgpack.unpackb(payload[:offset]), payload[offset:]) == (HAVE, [[]], b"")


def test_a_transfer_written_from_the_document_arrives(far: Far) -> None:
    transfer_id, payload = os.urandom(16), os.urandom(200)
    with _dialled(far) as peer:
        _open(peer, transfer_id)
        head = HEADER.pack(b"PRFS", 1, CHUNK, 2, len(payload), transfer_id, 0, 0, 0)[:40]
        checksum = xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(head))
        peer.sendall(head + struct.pack("<Q", checksum) + payload)
        heard = {kind: (offset, body) for kind, offset, body in (_heard(peer), _heard(peer))}
        assert heard[ACK][0] == 1
        assert msgpack.unpackb(heard[DONE][1]) == [HEADER.size + len(payload), 0]
        wait_until(lambda: bool(far.of(ReceiveCompleted)))
    assert b"".join(bytes(content) for content in far.memory[transfer_id]) == payload

"""Both ends of a connection prove that they know the deployment's secret, and agree on a version.

Each side signs both sides' names, nonces, versions and capabilities with HMAC-SHA256, in its own role. The nonces are
fresh, so a recorded handshake proves nothing; names and versions are signed, so nobody in between can change them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Container
from dataclasses import dataclass, replace

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.fp8 import LOSSY_FP8
from prfaas.transport.codec.packing import CODECS
from prfaas.transport.net.connection import SILENCE_SECONDS, Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import NONCE_BYTES, PROOF_BYTES, Challenge, Hello
from prfaas.transport.protocol.wire import NO_TRANSFER, VERSION, FrameType, Header

VERSIONS = (VERSION,)
RATE = "rate"  # a side that sends heeds what it is told that it may send
CAPABILITIES = (*CODECS, RATE)  # what this side can do beyond the version; unknown ones are ignored
_NO_PROOF = bytes(PROOF_BYTES)


def capabilities_of(*, packs: bool = True, lossy_fp8: bool = False) -> tuple[str, ...]:
    """What a side with these settings can do."""
    return (CODECS if packs else ()) + (RATE,) + ((LOSSY_FP8,) if lossy_fp8 else ())


@dataclass(frozen=True)
class Identity:
    """Who this process is on the wire, and what proves it."""

    name: str
    key: bytes
    boot_id: bytes = NO_TRANSFER
    capabilities: tuple[str, ...] = CAPABILITIES


def dial(connection: Connection, identity: Identity, *, peer_name: str, receives: bool = False) -> Challenge:
    """Prove who we are, and have the listener prove that it is `peer_name`; `receives`: it is the one that will send.

    Returns its answer, with the capabilities of both.


    Raises:
        OSError: the connection is gone.
        RemoteProtocolError: it is somebody else, knows another secret, or refuses.
    """
    boot_id = identity.boot_id if receives else NO_TRANSFER
    hello = Hello(identity.name, secrets.token_bytes(NONCE_BYTES), VERSIONS, identity.capabilities, boot_id)
    connection.write(messages.encode_hello(hello))
    try:
        answer = _payload(connection)
    except ConnectionResetError as error:
        hint = "" if connection.certified_name is not None else "; it may ask for certificates (tls_)"
        raise ConnectionResetError(f"{error} before it said who it is{hint}") from error
    challenge = messages.decode_challenge(answer)
    transcript = _transcript(hello, challenge)
    if not hmac.compare_digest(challenge.proof, _proof(identity.key, b"listener", transcript)):
        raise RemoteProtocolError("secret", "the peer does not know this deployment's secret")
    if challenge.name != peer_name:
        raise RemoteProtocolError("name", f"{challenge.name} answers where {peer_name} was expected")
    _check_certificate(connection, challenge.name)
    if challenge.version not in VERSIONS:
        raise RemoteProtocolError("version", f"the peer chose version {challenge.version}")
    connection.write(messages.encode_proof(_proof(identity.key, b"dialer", transcript)))
    _payload(connection)  # WELCOME
    if receives:
        connection.state = "receiving"
    connection.set_read_timeout(SILENCE_SECONDS)
    return replace(challenge, capabilities=tuple(set(challenge.capabilities) & set(identity.capabilities)))


def answer(connection: Connection, identity: Identity, *, sends_to: Container[str] = ()) -> Hello:
    """Let a dialer prove who it is, and prove who we are. Peers of `sends_to` may dial to receive.

    Returns what it said, with the capabilities of both.

    Raises:
        OSError: the connection is gone.
        RemoteProtocolError: it does not know the secret, speaks no version of ours, or wants what it may not.
    """
    hello = messages.decode_hello(_payload(connection))
    _check_certificate(connection, hello.name)
    version = max(set(VERSIONS) & set(hello.versions), default=None)
    if version is None:
        raise RemoteProtocolError("version", f"the peer speaks {hello.versions}, this side {VERSIONS}")
    common = tuple(word for word in identity.capabilities if word in hello.capabilities)
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge = Challenge(identity.name, nonce, version, common, identity.boot_id, _NO_PROOF)
    transcript = _transcript(hello, challenge)
    challenge = replace(challenge, proof=_proof(identity.key, b"listener", transcript))
    connection.write(messages.encode_challenge(challenge))
    if not hmac.compare_digest(
        messages.decode_proof(_payload(connection)), _proof(identity.key, b"dialer", transcript)
    ):
        raise RemoteProtocolError("secret", "the peer does not know this deployment's secret")
    if hello.boot_id != NO_TRANSFER:
        if hello.name not in sends_to:
            raise RemoteProtocolError("direction", f"{identity.name} does not wait for {hello.name} to fetch from it")
        connection.state = "sending"
    connection.write(Header(FrameType.WELCOME, 0).encode())
    connection.set_read_timeout(SILENCE_SECONDS)
    return replace(hello, capabilities=common)


def _check_certificate(connection: Connection, name: str) -> None:
    certified = connection.certified_name
    if certified is not None and certified != name:
        raise RemoteProtocolError("name", f"{name} shows a certificate for {certified or 'nobody'}")


def _payload(connection: Connection) -> bytearray:
    header = connection.read_header()
    payload = connection.read_payload(header)
    if header.type is FrameType.ERROR:
        message = messages.decode_ending(payload).message
        raise RemoteProtocolError("secret" if message.startswith("secret:") else "refused", message)
    return payload


def _transcript(hello: Hello, challenge: Challenge) -> bytes:
    theirs = [hello.name, hello.nonce, list(hello.versions), list(hello.capabilities), hello.boot_id]
    ours = [challenge.name, challenge.nonce, challenge.version, list(challenge.capabilities), challenge.boot_id]
    packed: bytes = msgpack.packb([theirs, ours])
    return packed


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, hashlib.sha256)

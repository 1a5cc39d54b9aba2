"""Handshake of a connection: both ends prove that they know the deployment's secret, and agree on a version.

Each end signs the names, nonces, versions and capabilities of both ends with HMAC-SHA256, in its own role. The nonces
are fresh, so a recorded handshake proves nothing. Names and versions are signed, so nobody in between can change them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Container
from dataclasses import dataclass, replace

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import CODECS
from prfaas.transport.net.connection import SILENCE_SECONDS, Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import NONCE_BYTES, PROOF_BYTES, Challenge, Hello
from prfaas.transport.protocol.wire import NO_TRANSFER, VERSION, ConnectionStep, FrameType, Header

VERSIONS = (VERSION,)
HEARTBEAT = "heartbeat"  # A sender with this capability sends PING every HEARTBEAT_SECONDS while it has transfers.
CAPABILITIES = (*CODECS, HEARTBEAT)  # Peers ignore capabilities that they do not know.
_NO_PROOF = bytes(PROOF_BYTES)


def capabilities_of(*, packs: bool) -> tuple[str, ...]:
    """Return the capabilities of an end with these settings."""
    return CAPABILITIES if packs else (HEARTBEAT,)


@dataclass(frozen=True)
class Identity:
    """Name of this process on the wire, and the key that proves it."""

    name: str
    key: bytes
    boot_id: bytes = NO_TRANSFER
    capabilities: tuple[str, ...] = CAPABILITIES


def dial(connection: Connection, identity: Identity, *, peer_name: str, receives: bool = False) -> Challenge:
    """Prove this end's name to a listener that must prove to be `peer_name`. With `receives`, the listener sends.

    Returns:
        The listener's challenge, with the capabilities of both ends.

    Raises:
        OSError: the connection is lost.
        RemoteProtocolError: the listener has another name, knows another secret, or refuses.
    """
    connection.advance(ConnectionStep.DIAL)
    boot_id = identity.boot_id if receives else NO_TRANSFER
    hello = Hello(identity.name, secrets.token_bytes(NONCE_BYTES), VERSIONS, identity.capabilities, boot_id)
    connection.write(messages.encode_hello(hello))
    try:
        answer = _payload(connection)
    except ConnectionResetError as error:
        hint = "" if connection.certified_name is not None else "; the peer may require certificates (tls_)"
        raise ConnectionResetError(f"{error} before sending its name{hint}") from error
    challenge = messages.decode_challenge(answer)
    transcript = _transcript(hello, challenge)
    if not hmac.compare_digest(challenge.proof, _proof(identity.key, b"listener", transcript)):
        raise RemoteProtocolError("secret", "the peer does not know this deployment's secret")
    if challenge.name != peer_name:
        raise RemoteProtocolError("name", f"{challenge.name} answers instead of {peer_name}")
    _check_certificate(connection, challenge.name)
    if challenge.version not in VERSIONS:
        raise RemoteProtocolError("version", f"the peer chose version {challenge.version}")
    connection.write(messages.encode_proof(_proof(identity.key, b"dialer", transcript)))
    _payload(connection)  # WELCOME
    if receives:
        connection.advance(ConnectionStep.REVERSE)
    connection.set_read_timeout(SILENCE_SECONDS)
    return replace(challenge, capabilities=tuple(set(challenge.capabilities) & set(identity.capabilities)))


def answer(connection: Connection, identity: Identity, *, sends_to: Container[str] = ()) -> Hello:
    """Let a dialler prove its name, and prove this end's. Diallers named in `sends_to` may ask to receive.

    Returns:
        The dialler's hello, with the capabilities of both ends.

    Raises:
        OSError: the connection is lost.
        RemoteProtocolError: the dialler knows another secret or version, or may not receive.
    """
    connection.advance(ConnectionStep.LISTEN)
    hello = messages.decode_hello(_payload(connection))
    _check_certificate(connection, hello.name)
    version = max(set(VERSIONS) & set(hello.versions), default=None)
    if version is None:
        raise RemoteProtocolError("version", f"the peer speaks {hello.versions}, this side {VERSIONS}")
    common = tuple(capability for capability in identity.capabilities if capability in hello.capabilities)
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
            raise RemoteProtocolError(
                "direction", f"{identity.name} does not expect {hello.name} to dial it and receive"
            )
        connection.advance(ConnectionStep.REVERSE)
    connection.write(Header(FrameType.WELCOME, 0).encode())
    connection.set_read_timeout(SILENCE_SECONDS)
    return replace(hello, capabilities=common)


def _check_certificate(connection: Connection, name: str) -> None:
    certified = connection.certified_name
    if certified is not None and certified != name:
        raise RemoteProtocolError("name", f"{name} presents a certificate for {certified or 'no name'}")


def _payload(connection: Connection) -> bytearray:
    header = connection.read_header()
    payload = connection.read_payload(header)
    if header.type is FrameType.ERROR:
        message = messages.decode_ending(payload).message
        raise RemoteProtocolError("secret" if message.startswith("secret:") else "refused", message)
    return payload


def _transcript(hello: Hello, challenge: Challenge) -> bytes:
    dialler = [hello.name, hello.nonce, list(hello.versions), list(hello.capabilities), hello.boot_id]
    listener = [challenge.name, challenge.nonce, challenge.version, list(challenge.capabilities), challenge.boot_id]
    packed: bytes = msgpack.packb([dialler, listener])
    return packed


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, hashlib.sha256)

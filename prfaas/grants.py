"""Grants: signed permissions for one transfer or copy between two named agents.

The process that decides the route signs the grant. Both agents hold the same secret and refuse transfers without a grant.
"""

import base64
import binascii
import hashlib
import hmac
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgpack

from prfaas.errors import ConfigError, GrantError
from prfaas.hashing import NO_HASH
from prfaas.types import TRANSFER_ID_BYTES, AgentName, BlockHash, TransferId

TRANSFER_VERSION = 1  # Without `kind`, so that agents of earlier versions accept transfers.
VERSION = 2  # For copies.
MAX_TRANSFER_BYTES = 64 << 30  # KV of one request.
MAX_GRANT_BYTES = 2048  # A grant with two names of 255 bytes has under 900 bytes.
_MAC_BYTES = 32
MIN_SECRET_BYTES = 32


def read_secret(path: Path) -> bytes:
    """Return the deployment's secret.

    Raises:
        ConfigError: the file cannot be read, is too short, or others may read it.
    """
    try:
        secret = path.read_bytes()
        check_private(path, setting="secret_file")
    except OSError as error:
        raise ConfigError(f"secret_file: {path} cannot be read ({error.strerror})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"secret_file: {path} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} random ones are needed"
        )
    return secret


def check_private(path: Path, *, setting: str) -> None:
    """Raise ConfigError when users outside the owner's group may access a file of secrets. Raise OSError if there is none."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        raise ConfigError(
            f"{setting}: {path} has mode {mode:o}, open to everybody; set mode 600 or 640: chmod 600 {path}"
        )


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose ("grant", "wire") out of the deployment's one secret."""
    return hmac.digest(secret, b"prfaas/" + purpose.encode(), hashlib.sha256)


GrantKind = Literal[
    "transfer",  # KV of a request; the claiming engine must name the same hashes.
    "copy",  # A prefix that a manager has chosen.
]
GrantEnd = Literal["source", "destination"]


@dataclass(frozen=True)
class Grant:
    """Permission for one transfer. `num_tokens` and `prompt_hash` cover the prompt without the last token."""

    transfer_id: TransferId
    source: AgentName
    destination: AgentName
    destination_address: str  # host:port where the destination receives KV.
    prompt_hash: BlockHash
    num_tokens: int
    max_bytes: int
    tenant: str
    expires_at: float  # Unix time in seconds.
    kind: GrantKind = "transfer"
    prefix_hash: BlockHash = NO_HASH  # Copies only: `hashing.prefix_hash` of the copied prefix.


_FIELDS: dict[str, type] = {
    "transfer_id": bytes,
    "source": str,
    "destination": str,
    "destination_address": str,
    "prompt_hash": bytes,
    "num_tokens": int,
    "max_bytes": int,
    "tenant": str,
    "expires_at": float,
}
_FIELDS_OF = {TRANSFER_VERSION: _FIELDS, VERSION: _FIELDS | {"kind": str, "prefix_hash": bytes}}


def sign(grant: Grant, key: bytes) -> bytes:
    """Return the grant as a msgpack body followed by an HMAC-SHA256."""
    version = TRANSFER_VERSION if grant.kind == "transfer" else VERSION
    body: bytes = msgpack.packb({"v": version} | {name: vars(grant)[name] for name in _FIELDS_OF[version]})
    return body + hmac.digest(key, body, hashlib.sha256)


def verify(token: bytes, key: bytes, *, kind: GrantKind, now: float) -> Grant:
    """Return the grant inside `token`.

    Raises:
        GrantError: it is malformed, not signed with `key`, of another version or kind, or expired at `now`.
    """
    if not _MAC_BYTES < len(token) <= MAX_GRANT_BYTES:
        raise GrantError("malformed", f"a grant has {_MAC_BYTES + 1} to {MAX_GRANT_BYTES} bytes, not {len(token)}")
    body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(key, body, hashlib.sha256)):
        raise GrantError("forged", "the grant is not signed with this deployment's secret")
    grant = _parse(msgpack.unpackb(body))
    if grant.expires_at < now:
        raise GrantError("expired", f"the grant expired {now - grant.expires_at:.1f} s ago")
    if grant.kind != kind:
        raise GrantError("other_use", f"the grant is for a {grant.kind}, not for a {kind}")
    return grant


def verify_end(
    token: bytes, key: bytes, *, kind: GrantKind, end: GrantEnd, agent: AgentName, transfer_id: TransferId, now: float
) -> Grant:
    """Return the grant inside `token` if it allows `agent` to be this end of this transfer.

    Raises:
        GrantError: as `verify`, or the grant names another agent or transfer.
    """
    grant = verify(token, key, kind=kind, now=now)
    allowed, what = (grant.source, "send") if end == "source" else (grant.destination, "receive")
    if (allowed, grant.transfer_id) != (agent, transfer_id):
        raise GrantError("not_ours", f"the grant lets {allowed} {what} {grant.transfer_id.hex()}")
    return grant


def unverified(token: bytes) -> Grant:
    """Return the claims of `token` without a check, for engines, which hold no secret. The agent verifies the same bytes.

    Raises:
        GrantError: it is malformed or of another version.
    """
    if not _MAC_BYTES < len(token) <= MAX_GRANT_BYTES:
        raise GrantError("malformed", f"a grant has {_MAC_BYTES + 1} to {MAX_GRANT_BYTES} bytes, not {len(token)}")
    try:
        return _parse(msgpack.unpackb(token[:-_MAC_BYTES]))
    except (ValueError, msgpack.UnpackException) as error:
        raise GrantError("malformed", f"a grant is msgpack: {error}") from error


def _parse(fields: Any) -> Grant:
    version = fields.pop("v", None) if isinstance(fields, dict) else None
    if version not in (TRANSFER_VERSION, VERSION):
        raise GrantError("version", f"the grant is of version {version}, not of {TRANSFER_VERSION} or {VERSION}")
    if {name: type(value) for name, value in fields.items()} != _FIELDS_OF[version]:
        raise GrantError("malformed", f"a grant has exactly the fields {', '.join(_FIELDS_OF[version])}")
    if len(fields["transfer_id"]) != TRANSFER_ID_BYTES:
        raise GrantError("malformed", f"transfer_id has {TRANSFER_ID_BYTES} bytes")
    return Grant(**fields)


def to_text(token: bytes) -> str:
    """Return the signed grant as written in `kv_transfer_params`."""
    return base64.urlsafe_b64encode(token).decode()


def from_text(text: str) -> bytes:
    """Return the inverse of `to_text`.

    Raises:
        GrantError: `text` is not base64.
    """
    try:
        return base64.urlsafe_b64decode(text.encode())
    except (binascii.Error, ValueError) as error:
        raise GrantError("malformed", f"a grant is URL-safe base64: {error}") from error

"""`prfaas certs`: a certificate authority for trials of mutual TLS."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.console.authority import DAY, LOOPBACK, Authority, IssuedCertificate
from prfaas.console.tables import Mood, Table
from prfaas.errors import ConfigError

State = Literal["valid", "expired", "revoked"]
_MOODS: dict[State, Mood] = {"valid": "good", "expired": "warning", "revoked": "bad"}


@dataclass(frozen=True)
class CertificateEntry:
    """One certificate of the directory, as shown to the user."""

    name: str
    state: State
    expires: str
    certificate: str
    key: str


def make(directory: Path, names: Sequence[str], *, hosts: Sequence[str], days: int) -> list[CertificateEntry]:
    """Create the authority if there is none, and issue a certificate for each name.

    Raises:
        ConfigError: the authority's key is missing, or a name is no valid file name.
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = Authority(directory)
    for name in names:
        authority.issue(name, valid_for=days * DAY, hosts=(*LOOPBACK, *hosts))
    return entries(directory)


def revoke(directory: Path, names: Iterable[str]) -> list[CertificateEntry]:
    """Put the certificates of these names on the revocation list.

    Raises:
        ConfigError: there is no authority, or no certificate of that name.
    """
    authority = _existing(directory)
    issued = {issue.certificate.stem: issue.serial for issue in authority.issued()}
    unknown = [name for name in names if name not in issued]
    if unknown:
        raise ConfigError(f"{directory} has no certificate for {', '.join(unknown)}; it has {', '.join(issued)}")
    authority.revoke(*(issued[name] for name in names))
    return entries(directory)


def entries(directory: Path) -> list[CertificateEntry]:
    """Return every certificate that the directory's authority signed. Raise ConfigError without an authority."""
    authority = _existing(directory)
    revoked, now = authority.revoked, datetime.datetime.now(datetime.UTC)
    return [_entry(issued, revoked, now) for issued in authority.issued()]


def _existing(directory: Path) -> Authority:
    if not (directory / "authority.pem").exists():
        raise ConfigError(f"{directory} has no authority; prfaas certs new {directory} NAME makes one")
    return Authority(directory)


def _entry(issued: IssuedCertificate, revoked: frozenset[int], now: datetime.datetime) -> CertificateEntry:
    state: State = "revoked" if issued.serial in revoked else "valid" if issued.expires_at > now else "expired"
    expires = issued.expires_at.isoformat(timespec="minutes")
    return CertificateEntry(issued.certificate.stem, state, expires, str(issued.certificate), str(issued.key))


def entries_table(found: Sequence[CertificateEntry]) -> Table:
    rows = tuple((entry.name, entry.state, entry.expires, entry.certificate, entry.key) for entry in found)
    moods = tuple[Mood, ...](_MOODS[entry.state] for entry in found)
    return Table("Certificates", ("name", "state", "until", "certificate", "key"), rows, moods)

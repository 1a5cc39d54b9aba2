"""`prfaas certs`: an authority of one's own to try mutual TLS out with, its certificates, and its revocation list."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.console.authority import DAY, LOOPBACK, Authority, Issued
from prfaas.console.tables import Mood, Table
from prfaas.errors import ConfigError

State = Literal["valid", "expired", "revoked"]
_MOODS: dict[State, Mood] = {"valid": "good", "expired": "warning", "revoked": "bad"}


@dataclass(frozen=True)
class Entry:
    """One certificate in the directory."""

    name: str
    state: State
    expires: str
    certificate: str
    key: str


def make(directory: Path, names: Sequence[str], *, hosts: Sequence[str], days: int) -> list[Entry]:
    """Found the authority if it is not there, and issue a certificate for each name.

    Raises:
        ConfigError: the authority's key is not there, or a name cannot be a file's.
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = Authority(directory)
    for name in names:
        authority.issue(name, valid_for=days * DAY, hosts=(*LOOPBACK, *hosts))
    return entries(directory)


def revoke(directory: Path, names: Iterable[str]) -> list[Entry]:
    """Put the certificates of these names on the list.

    Raises:
        ConfigError: there is no authority, or no certificate of that name.
    """
    authority = _existing(directory)
    issued = {its.certificate.stem: its.serial for its in authority.issued()}
    unknown = [name for name in names if name not in issued]
    if unknown:
        raise ConfigError(f"{directory} has no certificate for {', '.join(unknown)}; it has {', '.join(issued)}")
    authority.revoke(*(issued[name] for name in names))
    return entries(directory)


def entries(directory: Path) -> list[Entry]:
    """Return every certificate in the directory that its authority signed. Raises ConfigError when there is no authority."""
    authority = _existing(directory)
    revoked, now = authority.revoked, datetime.datetime.now(datetime.UTC)
    return [_entry(its, revoked, now) for its in authority.issued()]


def _existing(directory: Path) -> Authority:
    if not (directory / "authority.pem").exists():
        raise ConfigError(f"{directory} has no authority; prfaas certs new {directory} NAME makes one")
    return Authority(directory)


def _entry(its: Issued, revoked: frozenset[int], now: datetime.datetime) -> Entry:
    state: State = "revoked" if its.serial in revoked else "valid" if its.expires_at > now else "expired"
    expires = its.expires_at.isoformat(timespec="minutes")
    return Entry(its.certificate.stem, state, expires, str(its.certificate), str(its.key))


def entries_table(found: Sequence[Entry]) -> Table:
    rows = tuple((its.name, its.state, its.expires, its.certificate, its.key) for its in found)
    moods = tuple[Mood, ...](_MOODS[its.state] for its in found)
    return Table("Certificates", ("name", "state", "until", "certificate", "key"), rows, moods)

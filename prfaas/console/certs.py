"""`prfaas certs`: a certificate authority for trials of mutual TLS."""

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from prfaas.console.authority import DAY, LOOPBACK, Authority
from prfaas.console.tables import Mood, Table
from prfaas.errors import ConfigError

State = Literal["valid", "expired", "revoked"]
_MOODS: dict[State, Mood] = {"valid": "good", "expired": "warning", "revoked": "bad"}


def make(directory: Path, names: Sequence[str], *, hosts: Sequence[str], days: int) -> Table:
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


def revoke(directory: Path, names: Iterable[str]) -> Table:
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


def entries(directory: Path) -> Table:
    """Return every certificate that the directory's authority signed. Raise ConfigError without an authority."""
    authority = _existing(directory)
    revoked, now = authority.revoked, datetime.datetime.now(datetime.UTC)
    rows, moods = [], list[Mood]()
    for issued in authority.issued():
        state: State = "revoked" if issued.serial in revoked else "valid" if issued.expires_at > now else "expired"
        expires = issued.expires_at.isoformat(timespec="minutes")
        rows.append((issued.certificate.stem, state, expires, str(issued.certificate), str(issued.key)))
        moods.append(_MOODS[state])
    return Table("Certificates", ("name", "state", "expires", "certificate", "key"), tuple(rows), tuple(moods))


def _existing(directory: Path) -> Authority:
    if not (directory / "authority.pem").exists():
        raise ConfigError(f"{directory} has no authority; prfaas certs new {directory} NAME makes one")
    return Authority(directory)

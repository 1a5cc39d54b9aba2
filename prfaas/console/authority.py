"""Certificate authority for trials of mutual TLS and for tests: issues and revokes certificates."""

import datetime
import ipaddress
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from prfaas.errors import ConfigError

DAY = datetime.timedelta(days=1)
AUTHORITY_DAYS = 3650
LIST_DAYS = 90  # An expired list rejects all certificates, so publish a new one earlier.
LOOPBACK = ("127.0.0.1", "localhost")
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class IssuedCertificate:
    """One certificate with the PEM files that settings name."""

    authority: Path
    certificate: Path
    key: Path
    revocations: Path
    serial: int
    expires_at: datetime.datetime


class Authority:
    """Authority whose files lie in one directory. An existing one is continued."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        """Open or create the authority. Raise ConfigError when its certificate exists without the key."""
        self._directory = directory
        self._name = _subject(name)
        self.path = directory / f"{name}.pem"
        self.revocations = directory / f"{name}.crl"
        key = directory / f"{name}.key"
        if self.path.exists() and not key.exists():
            raise ConfigError(f"{self.path} exists and {key} does not; use the machine where the authority was created")
        self._key = _read_key(key) if key.exists() else self._create(key)
        self.revoke()

    def _create(self, path: Path) -> ec.EllipticCurvePrivateKey:
        key = _create_key(path)
        made = self._builder(self._name, key.public_key(), AUTHORITY_DAYS * DAY)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(_PEM))
        return key

    def issue(
        self, name: str, *, valid_for: datetime.timedelta = DAY, hosts: Sequence[str] = LOOPBACK
    ) -> IssuedCertificate:
        """Issue a certificate for `name` that may serve on `hosts` (addresses and names). A negative time has expired.

        Raises:
            ConfigError: the name is no valid file name, or is the authority's own.
        """
        if not name or "/" in name or name.startswith(".") or name == self.path.stem:
            raise ConfigError(f"{name!r}: write a valid file name other than the authority's own")
        certificate, path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        key = _create_key(path)
        made = self._builder(_subject(name), key.public_key(), valid_for)
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        certificate.write_bytes(signed.public_bytes(_PEM))
        return self._issued(path, signed)

    def issued(self) -> Iterator[IssuedCertificate]:
        """Yield the certificates in the directory that this authority signed, by name."""
        own = x509.load_pem_x509_certificate(self.path.read_bytes())
        for path in sorted(self._directory.glob("*.pem")):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            if path != self.path and _is_signed_by(own, certificate):
                yield self._issued(path.with_suffix(".key"), certificate)

    def _issued(self, key: Path, certificate: x509.Certificate) -> IssuedCertificate:
        expires_at = certificate.not_valid_after_utc
        serial = certificate.serial_number
        return IssuedCertificate(self.path, key.with_suffix(".pem"), key, self.revocations, serial, expires_at)

    @property
    def revoked(self) -> frozenset[int]:
        """Return the serial numbers on the list."""
        if not self.revocations.exists():
            return frozenset()
        published = x509.load_pem_x509_crl(self.revocations.read_bytes())
        return frozenset(entry.serial_number for entry in published)

    def revoke(self, *serials: int) -> None:
        """Publish a new revocation list that also contains these serial numbers."""
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateRevocationListBuilder(self._name, now - DAY, now + LIST_DAYS * DAY)
        for serial in sorted({*self.revoked, *serials}):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY / 2)
            made = made.add_revoked_certificate(entry.build())
        self.revocations.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + valid_for)
        )


def _is_signed_by(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, InvalidSignature):
        return False
    return True


def _create_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a new key, stored in a file that only the owner may read."""
    key = ec.generate_private_key(ec.SECP256R1())
    data = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return key


def list_ends_at(revocations: Path) -> float:
    """Return the Unix time when a revocation list expires.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no PEM revocation list.
    """
    ends = x509.load_pem_x509_crl(revocations.read_bytes()).next_update_utc
    return math.inf if ends is None else ends.timestamp()


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "`_create_key` creates EC keys only"
    return key


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

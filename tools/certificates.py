"""An authority that signs certificates as a deployment's would, and takes them back: for tests and benchmarks."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """PEM files, as settings name them."""

    authority: Path
    certificate: Path
    key: Path
    revocations: Path
    serial: int


class Authority:
    """Keeps its files, and those it issues, in one directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._name = _subject(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = directory / f"{name}.pem"
        self.revocations = directory / f"{name}.crl"
        made = self._builder(self._name, self._key.public_key(), DAY)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        self.revoke()

    def issue(self, name: str, *, valid_for: datetime.timedelta = DAY) -> Issued:
        """A certificate for `name`, which may serve on 127.0.0.1; a negative time has run out."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(_subject(name), key.public_key(), valid_for).add_extension(address, critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        issued = Issued(
            self.path,
            self._directory / f"{name}.pem",
            self._directory / f"{name}.key",
            self.revocations,
            signed.serial_number,
        )
        issued.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        issued.key.write_bytes(key.private_bytes(*form))
        return issued

    def revoke(self, *serials: int) -> None:
        """Publish a list of exactly these."""
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateRevocationListBuilder(self._name, now - DAY, now + DAY)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY / 2)
            made = made.add_revoked_certificate(entry.build())
        signed = made.sign(self._key, hashes.SHA256())
        self.revocations.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

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


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

"""Setting `tls` of a component from an issued certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.transport.net.tls import TlsConfig

if TYPE_CHECKING:
    from prfaas.console.authority import IssuedCertificate
    from prfaas.transport.net.tls import CertificateFiles


def tls_config(issued: IssuedCertificate | CertificateFiles) -> TlsConfig:
    """Return the setting without a revocation list."""
    return TlsConfig(authority=issued.authority, certificate=issued.certificate, key=issued.key)


def tls_record(issued: IssuedCertificate | CertificateFiles) -> dict[str, str]:
    """Return the same setting as a record of a YAML file."""
    return {name: str(getattr(issued, name)) for name in ("authority", "certificate", "key")}

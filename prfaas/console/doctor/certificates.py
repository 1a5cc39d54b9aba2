"""Checks of a component's certificate."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from prfaas.console.authority import list_ends_at
from prfaas.console.doctor.finding import Finding, bad, good, warning
from prfaas.transport.net.tls import CERTIFICATE_FAULTS, CertificateFiles, certificate_shown, common_name, make_contexts

SOON_SECONDS = 14 * 86400.0
_REMEDIES: dict[int, tuple[str, str]] = {  # X509_V_ERR_* codes, as in CERTIFICATE_FAULTS.
    9: ("certificate_time", "set this machine's clock, or renew it"),
    10: ("certificate_time", "renew it; agents load new files without a restart"),
    12: ("certificate_time", "publish a new list as tls.revocations"),
    23: ("certificate_revoked", "issue another, with a new key"),
}


def certificate_findings(files: CertificateFiles, *, name: str | None, where: str) -> Iterator[Finding]:
    """Check the files. `name` is the expected common name; None accepts any.

    Without an authority the certificate is for clients, who trust authorities of their own.
    """
    yield from _modes(files.key, where)
    try:
        contexts = _contexts(files)
    except ssl.SSLError as error:
        yield _unusable(files, error, where)
        return
    except OSError as error:
        remedy = f"ls -l {' '.join(map(str, files.paths))}"
        yield bad("certificate_files", where, f"the files cannot be read: {error.strerror}", remedy=remedy)
        return
    try:
        shown = certificate_shown(*contexts)
    except ssl.SSLCertVerificationError as error:
        yield _rejected(files, error, where)
        return
    if files.authority is not None:
        yield good("certificate_authority", where, f"{files.certificate} is signed by {files.authority}")
    yield _name(files.certificate, shown, name, where)
    yield _time(files.certificate, shown, where)


def clients_finding(authority: Path, revocations: Path | None, *, where: str) -> Finding:
    """Check the files by which a router accepts client certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(authority)
    except OSError as error:
        remedy = "set client_tls.authority to the PEM file of the authority of your clients' certificates"
        return bad("certificate_authority", where, f"{authority} cannot be used: {_why(error)}", remedy=remedy)
    if revocations is not None:
        remedy = "publish a new list as client_tls.revocations; until then every client is rejected"
        try:
            ends_at = list_ends_at(revocations)
        except (OSError, ValueError) as error:
            return bad("certificate_files", where, f"{revocations} cannot be used: {_why(error)}", remedy=remedy)
        if ends_at < time.time():
            return bad("certificate_time", where, f"{revocations}: the revocation list has expired", remedy=remedy)
    return good("certificate_authority", where, f"clients need a certificate signed by {authority}")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _contexts(files: CertificateFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS contexts for both ends. Without an authority, the certificate is trusted itself."""
    client, server = make_contexts(files)
    if files.authority is None:
        client.load_verify_locations(files.certificate)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return client, server


def _modes(key: Path, where: str) -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        if key.stat().st_mode & 0o077:
            yield bad("key_mode", where, f"others may read {key}", remedy=f"chmod 600 {key}")
        else:
            yield good("key_mode", where, f"only its owner may read {key}")


def _unusable(files: CertificateFiles, error: ssl.SSLError, where: str) -> Finding:
    if error.reason == "KEY_VALUES_MISMATCH":
        message = f"{files.key} is not the key of {files.certificate}"
        same = f"openssl x509 -noout -pubkey -in {files.certificate}; openssl pkey -pubout -in {files.key}"
        return bad("certificate_key", where, message, remedy=f"name the pair that belongs together; compare: {same}")
    remedy = "write PEM files: certificate, key without a passphrase, authority"
    return bad("certificate_files", where, f"the files cannot be used: {error.reason or 'no PEM'}", remedy=remedy)


def _rejected(files: CertificateFiles, error: ssl.SSLCertVerificationError, where: str) -> Finding:
    if error.verify_code in CERTIFICATE_FAULTS:
        subject, remedy = _REMEDIES[error.verify_code]
        return bad(subject, where, f"{files.certificate}: {CERTIFICATE_FAULTS[error.verify_code]}", remedy=remedy)
    message = f"{files.certificate}: {files.authority} has not signed it ({error.verify_message})"
    remedy = "name the authority that signed it as tls.authority, the same on every machine"
    return bad("certificate_authority", where, message, remedy=remedy)


def _name(path: Path, shown: dict[str, object], wanted: str | None, where: str) -> Finding:
    name = common_name(shown)
    if wanted in (None, name):
        return good("certificate_name", where, f"{path} is for {name}")
    message = f"{path} is for {name or 'no name'}, but peers expect {wanted}"
    return bad("certificate_name", where, message, remedy=f"issue a certificate with the common name {wanted}")


def _time(path: Path, shown: dict[str, object], where: str) -> Finding:
    left = ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()
    message = f"{path} is valid for {left / 86400:.0f} more days"
    if left < SOON_SECONDS:
        return warning("certificate_time", where, message, remedy="renew it before it expires")
    return good("certificate_time", where, message)

"""Explanations of certificates and failed TLS handshakes: whose certificate is at fault, and why."""

import contextlib
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.console.authority import DAY, Authority, IssuedCertificate
from prfaas.transport.net.tls import CertificateFiles, describe_certificate, describe_error, make_contexts


def _contexts(issued: IssuedCertificate, authority: Authority) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return make_contexts(CertificateFiles(authority.path, issued.certificate, issued.key, authority.revocations))


def _shake_hands(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> tuple[str, str]:
    """Return the errors of client and server; an empty string for none."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (dialling.wrap_bio(to_client, to_server), listening.wrap_bio(to_server, to_client, server_side=True))
    errors = ["", ""]
    for _ in range(4):  # TLS 1.3 needs two turns of each side.
        for number, side in enumerate(sides):
            if errors[number]:
                continue
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                    side.read(1)
            except ssl.SSLError as error:
                errors[number] = describe_error(error)
    return errors[0], errors[1]


@pytest.mark.parametrize(
    ("kind", "near_says", "far_says"),
    [
        ("good", "", ""),
        ("expired", "the peer refuses our certificate: it has expired", "the peer's certificate has expired: "),
        ("revoked", "the peer refuses our certificate: it is revoked", "the peer's certificate is revoked: "),
        (
            "foreign",
            "the peer refuses our certificate: the peer trusts another authority",
            "the peer has no certificate of this deployment's authority: ",
        ),
    ],
)
def test_an_invalid_certificate_is_explained_at_both_ends(
    kind: str, near_says: str, far_says: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    issuer = Authority(tmp_path, "other") if kind == "foreign" else authority
    near = issuer.issue("near", valid_for=-DAY if kind == "expired" else DAY)
    if kind == "revoked":
        authority.revoke(near.serial)
    dialling, _ = _contexts(near, authority)
    _, listening = _contexts(authority.issue("far"), authority)
    errors = _shake_hands(dialling, listening)
    assert errors[0].startswith(near_says) and errors[1].startswith(far_says)
    assert [bool(error) for error in errors] == [kind != "good"] * 2


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _files(authority: Authority, **issue: object) -> CertificateFiles:
    issued = authority.issue("west-0", **issue)  # type: ignore[arg-type]
    return CertificateFiles(issued.authority, issued.certificate, issued.key, issued.revocations)


def test_a_valid_certificate_is_described_with_what_may_be_wrong_elsewhere(authority: Authority) -> None:
    files = _files(authority)
    description = describe_certificate(files)
    assert f"west-0.pem: for west-0, signed by {files.authority} and good until " in description
    assert "it may not be of the authority that the other side trusts; openssl x509" in description
    assert "it may be revoked, or not be of the authority" in describe_certificate(replace(files, revocations=None))


def test_faults_of_a_certificate_are_named(authority: Authority, tmp_path: Path) -> None:
    assert "west-0.pem: it has expired; openssl" in describe_certificate(_files(authority, valid_for=-DAY))
    files = _files(authority)
    stranger = Authority(tmp_path, "stranger").path
    assert f"west-0.pem: {stranger} has not signed it (" in describe_certificate(
        replace(files, authority=stranger, revocations=None)
    )
    files.key.unlink()
    assert "west-0.key" in describe_certificate(files) and "cannot be used: No such file" in describe_certificate(files)


def test_a_revoked_certificate_is_named_if_there_is_a_revocation_list(authority: Authority) -> None:
    files = _files(authority)
    authority.revoke(authority.issue("west-0").serial)
    assert "its authority has revoked it" in describe_certificate(files)
    assert "it may be revoked" in describe_certificate(replace(files, revocations=None))

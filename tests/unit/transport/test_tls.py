"""What is said of a TLS handshake that fails: whose certificate is at fault, and how."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest

from prfaas.console.authority import DAY, Authority, Issued
from prfaas.transport.net.tls import CertificateFiles, describe_error, make_contexts


def _contexts(its: Issued, authority: Authority) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return make_contexts(CertificateFiles(authority.path, its.certificate, its.key, authority.revocations))


def _shake_hands(dialling: ssl.SSLContext, listening: ssl.SSLContext) -> tuple[str, str]:
    """What the dialling and the listening side have to say of it; "" for nothing."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        dialling.wrap_bio(to_client, to_server),
        listening.wrap_bio(to_server, to_client, server_side=True),
    )
    said = ["", ""]
    for _ in range(4):  # TLS 1.3 needs two turns of each side
        for number, side in enumerate(sides):
            if said[number]:
                continue
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                    side.read(1)
            except ssl.SSLError as error:
                said[number] = describe_error(error)
    return said[0], said[1]


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
def test_a_certificate_that_does_not_count_is_named_at_both_ends(
    kind: str, near_says: str, far_says: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    theirs = Authority(tmp_path, "other") if kind == "foreign" else authority
    near = theirs.issue("near", valid_for=-DAY if kind == "expired" else DAY)
    if kind == "revoked":
        authority.revoke(near.serial)
    dialling, _ = _contexts(near, authority)
    _, listening = _contexts(authority.issue("far"), authority)
    heard = _shake_hands(dialling, listening)
    assert heard[0].startswith(near_says) and heard[1].startswith(far_says)
    assert [bool(its) for its in heard] == [kind != "good"] * 2


def test_who_speaks_no_tls_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    _, listening = _contexts(authority.issue("far"), authority)
    incoming = ssl.MemoryBIO()
    incoming.write(b"PRFS" + bytes(44))
    with pytest.raises(ssl.SSLError) as failed:
        listening.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    assert describe_error(failed.value).startswith("the peer does not use TLS: ")


def test_any_other_error_says_what_it_says() -> None:
    assert describe_error(OSError("no such host")) == "no such host"

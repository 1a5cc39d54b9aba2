from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.console.authority import DAY, Authority
from prfaas.transport.net.tls import CertificateFiles, describe_certificate


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _files(authority: Authority, **issue: object) -> CertificateFiles:
    its = authority.issue("west-0", **issue)  # type: ignore[arg-type]
    return CertificateFiles(its.authority, its.certificate, its.key, its.revocations)


def test_one_that_is_good_is_described_and_what_can_be_wrong_elsewhere_is_said(authority: Authority) -> None:
    files = _files(authority)
    said = describe_certificate(files)
    assert f"west-0.pem: for west-0, signed by {files.authority} and good until " in said
    assert "it may not be of the authority that the other side trusts; openssl x509" in said
    assert "it may be revoked, or not be of the authority" in describe_certificate(replace(files, revocations=None))


def test_what_is_wrong_with_one_is_said(authority: Authority, tmp_path: Path) -> None:
    assert "west-0.pem: it has expired; openssl" in describe_certificate(_files(authority, valid_for=-DAY))
    files = _files(authority)
    stranger = Authority(tmp_path, "stranger").path
    assert f"west-0.pem: {stranger} has not signed it (" in describe_certificate(
        replace(files, authority=stranger, revocations=None)
    )
    files.key.unlink()
    assert "west-0.key" in describe_certificate(files) and "cannot be used: No such file" in describe_certificate(files)


def test_that_it_is_revoked_is_said_where_the_list_is_there(authority: Authority) -> None:
    its = authority.issue("west-0")
    authority.revoke(its.serial)
    files = CertificateFiles(its.authority, its.certificate, its.key, its.revocations)
    assert "its authority has revoked it" in describe_certificate(files)
    assert "it may be revoked" in describe_certificate(replace(files, revocations=None))

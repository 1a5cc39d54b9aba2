"""`prfaas certs`: what it makes is taken by a manager, what it takes back is on the list."""

import ssl
from pathlib import Path

from prfaas.console.doctor.certificates import certificate_findings
from prfaas.transport.net.tls import CertificateFiles
from tests.integration.console.terminal import run_here, run_here_on_terminal


def _files(directory: Path, name: str) -> CertificateFiles:
    authority, revocations = directory / "authority.pem", directory / "authority.crl"
    return CertificateFiles(authority, directory / f"{name}.pem", directory / f"{name}.key", revocations)


def test_what_it_makes_is_well_and_what_it_revokes_is_not(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    made = run_here("certs", "new", str(directory), "west-0", "east-0", "--host=10.0.1.1", "--host=west.example")
    assert made.status == 0, made.error
    assert [(item["name"], item["state"]) for item in made.document] == [("east-0", "valid"), ("west-0", "valid")]
    files = _files(directory, "west-0")
    assert {finding.outcome for finding in certificate_findings(files, name="west-0", where="")} == {"good"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.glob("*.key"))
    shown = ssl._ssl._test_decode_cert(str(files.certificate))  # type: ignore[attr-defined]
    assert {value for _, value in shown["subjectAltName"]} >= {"127.0.0.1", "localhost", "10.0.1.1", "west.example"}
    revoked = run_here("certs", "revoke", str(directory), "west-0")
    assert {item["name"]: item["state"] for item in revoked.document} == {"east-0": "valid", "west-0": "revoked"}
    assert "certificate_revoked" in {
        finding.subject for finding in certificate_findings(files, name="west-0", where="")
    }
    assert "revoked" in run_here_on_terminal("certs", "ls", str(directory)).output


def test_it_goes_on_with_the_authority_that_is_there(tmp_path: Path) -> None:
    run_here("certs", "new", str(tmp_path), "west-0")
    authority = (tmp_path / "authority.pem").read_bytes()
    run_here("certs", "revoke", str(tmp_path), "west-0")
    again = run_here("certs", "new", str(tmp_path), "router", "--days=1")
    assert (tmp_path / "authority.pem").read_bytes() == authority
    assert {item["name"]: item["state"] for item in again.document} == {"router": "valid", "west-0": "revoked"}
    (tmp_path / "authority.key").unlink()
    lost = run_here("certs", "new", str(tmp_path), "another")
    assert lost.status == 2 and "authority.key" in lost.error


def test_the_authority_s_own_name_is_nobody_else_s(tmp_path: Path) -> None:
    run_here("certs", "new", str(tmp_path), "west-0")
    key = (tmp_path / "authority.key").read_bytes()
    refused = run_here("certs", "new", str(tmp_path), "authority")
    assert refused.status == 2 and "'authority'" in refused.error
    assert (tmp_path / "authority.key").read_bytes() == key
    again = run_here("certs", "new", str(tmp_path), "router")
    assert {item["name"]: item["state"] for item in again.document} == {"router": "valid", "west-0": "valid"}


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert "prfaas certs new" in run_here("certs", "ls", str(tmp_path)).error
    run_here("certs", "new", str(tmp_path), "west-0")
    assert "no certificate for west-1; it has west-0" in run_here("certs", "revoke", str(tmp_path), "west-1").error
    assert "valid file name" in run_here("certs", "new", str(tmp_path), "west/0").error

"""Flags of `prfaas-bench link`: refused values, certificates, and the progress line."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.cli.bench import main, progress_line
from prfaas.console.authority import Authority, IssuedCertificate
from prfaas.transport.sender.stats import LinkStats

TO = ("link", "--to", "127.0.0.1:9", "--secret-file")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("flag", "value", "accepted"),
    [
        ("--layers", "0", "at least 1, at most 4096"),
        ("--layers", "1e9", "at least 1, at most 4096"),
        ("--layers", "many", "a whole number"),
        ("--layer-bytes", "0", "at least 1"),
        ("--repeats", "0", "at least 1"),
        ("--tokens", "0", "at least 1, at most 4294967295"),
        ("--tokens", "1e99", "at least 1, at most 4294967295"),
        ("--memory", "0", "at least 1"),
        ("--max-rate", "10", "a rate such as"),
        ("--link-rate", "1e999Gbps", "a rate such as"),
        ("--to", "10.0.0.1", "host:port such as"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_accepted_form(
    flag: str, value: str, accepted: str, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TO, secret, flag, value])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and f"{flag}: {value!r}: " in error and accepted in error


def test_layers_beyond_the_memory_of_the_host_are_refused_by_flag(
    secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TO, secret, "--layers", "4096", "--layer-bytes", "1e18"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "prfaas-bench: --layers, --layer-bytes" in error


def _tls(issued: IssuedCertificate, name: str) -> list[str]:
    files = {"authority": issued.authority, "certificate": issued.certificate, "key": issued.key}
    return [*(f"--tls-{what}={path}" for what, path in files.items()), "--name", name, "--peer", "far"]


@pytest.mark.parametrize(
    ("name", "days", "complaint"),
    [
        ("near", -1, "--tls-certificate: {certificate}: it has expired"),
        ("other", 1, "--name: {certificate} is for near"),
    ],
)
def test_a_certificate_that_the_receiver_would_refuse_is_named(
    name: str, days: int, complaint: str, secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issued = Authority(tmp_path).issue("near", valid_for=datetime.timedelta(days=days))
    assert main([*TO, secret, *_tls(issued, name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and complaint.format(certificate=issued.certificate) in error


def test_a_certificate_of_another_authority_is_named(
    secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issued, authority = Authority(tmp_path).issue("near"), Authority(tmp_path, "other").path
    line = _tls(issued, "near")
    line[0] = f"--tls-authority={authority}"
    assert main([*TO, secret, *line]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--tls-certificate: {issued.certificate}: {authority} has not signed it" in error


def test_progress_without_a_connection_shows_no_figures() -> None:
    nothing = LinkStats(**dict.fromkeys(LinkStats.__dataclass_fields__, 0))  # type: ignore[arg-type]
    assert progress_line(0.25, nothing) == " 25.0%, no connection to the receiver"
    connected = replace(nothing, num_connections=1, queued_bytes=2_000_000)
    assert progress_line(0.25, connected).startswith(" 25.0%, 2 MB to go on 1 connections, rate not known yet")

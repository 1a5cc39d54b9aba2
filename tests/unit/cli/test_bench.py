"""Flags of `prfaas-bench link`: refused values, and the progress line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.cli.bench import main, progress_line
from prfaas.transport.sender.stats import LinkStats
from tests.support.secret_files import write_deployment_secret

TO = ("link", "--to", "127.0.0.1:9", "--secret-file")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return str(write_deployment_secret(tmp_path))


@pytest.mark.parametrize(
    ("flag", "value", "accepted"),
    [
        ("--repeats", "0", "at least 1"),
        ("--tokens", "1e99", "at least 1, at most 4294967295"),
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


def test_progress_without_a_connection_shows_no_figures() -> None:
    nothing = LinkStats(**dict.fromkeys(LinkStats.__dataclass_fields__, 0))  # type: ignore[arg-type]
    assert progress_line(0.25, nothing) == " 25.0%, no connection to the receiver"
    connected = replace(nothing, num_connections=1, queued_bytes=2_000_000)
    assert progress_line(0.25, connected).startswith(" 25.0%, 2 MB to go on 1 connections, rate not known yet")

"""Text form of PPD's table, and the file of its authors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.cli.ppd import main
from prfaas.ppd.table_text import draw
from prfaas.scheduler.ppd import PpdEntry, PpdTable, read_measured, to_measured
from tests.unit.scheduler.endpoint_picker.conformance import DATA

AUTHORS = DATA / "ppd-table-2P2D.json"


def test_authors_table_is_written_as_it_was_read() -> None:
    fields = json.loads(AUTHORS.read_text())
    written = to_measured(read_measured(fields))
    assert written["weights"] == fields["weights"]
    for entry, expected in zip(written["entries"], fields["entries"], strict=True):
        assert {name: entry[name] for name in ("context_class", "workload_type", "qps", "use_ppd")} == {
            name: expected[name] for name in ("context_class", "workload_type", "qps", "use_ppd")
        }
        for name in ("pd_ttft_ms", "ppd_ttft_ms", "pd_tpot_ms", "ppd_tpot_ms", "score"):
            assert entry[name] == pytest.approx(expected[name], abs=1e-6)


def test_each_cell_names_the_instance_that_prefills() -> None:
    entries = (
        PpdEntry("small", "tiny", 1.0, 0.2, 0.1, 0.010, 0.010),
        PpdEntry("small", "tiny", 2.0, 0.1, 0.2, 0.010, 0.010),
        PpdEntry("small", "mid_bal", 2.0, 0.0, 0.2, 0.0, 0.010),
    )
    lines = draw(PpdTable(entries)).splitlines()
    assert lines[2].split() == ["small", "context", "1", "QPS", "2", "QPS"]
    assert lines[3].split() == ["tiny", "D", "+0.50", "P", "-1.00"]
    assert lines[4].split() == ["mid_bal", "·", "D", "failed"]
    assert not any("large" in line for line in lines)


def test_weights_on_the_command_line_apply(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(AUTHORS)]) == 0
    balanced = capsys.readouterr().out
    assert main(["show", str(AUTHORS), "--w-ttft", "0"]) == 0
    tpot_only = capsys.readouterr().out
    assert balanced.count(" D ") > tpot_only.count(" D ")
    assert tpot_only.startswith("w_ttft 0, w_tpot 1.")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["show", "/absent.json"], "absent.json"),
        (["show", "{broken}"], "broken.json: not a PPD decision table"),
        (["show", str(AUTHORS), "--w-tpot", "-1"], "at least 0"),
        (["build", "--pd", "x", "--local", "x", "--model", "m", "--out", "o", "--workloads", "nonsense"], "'nonsense'"),
    ],
)
def test_unusable_input_is_named(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{}")
    try:
        status = main([argument.replace("{broken}", str(tmp_path / "broken.json")) for argument in arguments])
    except SystemExit as end:
        status = int(str(end.code))
    assert (status, named in capsys.readouterr().err) == (2, True)

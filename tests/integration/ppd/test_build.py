"""Command `prfaas-ppd build` against two endpoints: its load, its table, and its errors."""

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.cli.ppd import main
from prfaas.scheduler.ppd import LaterTurn, prefills_locally, read_measured
from tests.support.paced_engine import MODEL, PacedEngine, running

SLOW_SECONDS = 1.0
TOKEN_SECONDS = 0.1  # Pace of both engines, large compared with the noise of a busy machine.


@pytest.fixture
async def doors() -> AsyncIterator[tuple[PacedEngine, PacedEngine]]:
    """One that prefills elsewhere, and one that does not."""
    engines = PacedEngine(token_seconds=0.01), PacedEngine(token_seconds=0.01)
    async with running(*engines):
        yield engines


ONE_CELL = ("--contexts", "small", "--workloads", "tiny")


def _flags(doors: tuple[PacedEngine, PacedEngine], out: Path, *more: str) -> tuple[str, ...]:
    ends = ("--pd", doors[0].url, "--local", doors[1].url + "/", "--model", MODEL, "--out", str(out))
    return "build", *ends, "--seconds", "0.1", "--qps", "50", *more


async def _build(doors: tuple[PacedEngine, PacedEngine], out: Path, *more: str) -> tuple[int, str]:
    """Return the status and errors of the command, which runs on a thread of this process."""
    errors = io.StringIO()

    def build() -> int:
        with contextlib.redirect_stderr(errors):
            return main(_flags(doors, out, *more))

    return await asyncio.to_thread(build), errors.getvalue()


async def test_table_is_measured_and_can_be_read(doors: tuple[PacedEngine, PacedEngine], tmp_path: Path) -> None:
    doors[0].prefill_seconds = SLOW_SECONDS
    doors[0].token_seconds = doors[1].token_seconds = TOKEN_SECONDS
    out = tmp_path / "table.json"
    command = (sys.executable, "-m", "prfaas.cli.ppd", *_flags(doors, out, "--contexts", "small"))
    process = await asyncio.create_subprocess_exec(*command, "--workloads", "tiny,mid_paste", stdout=-1, stderr=-1)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors
    table = read_measured(json.loads(out.read_text()))
    assert {entry.cell for entry in table.entries} == {("small", "tiny", 50.0), ("small", "mid_paste", 50.0)}
    assert all(
        entry.pd_ttft_seconds >= SLOW_SECONDS and 0 < entry.ppd_ttft_seconds < entry.pd_ttft_seconds
        for entry in table.entries
    )
    assert prefills_locally(table, LaterTurn(256, 256, 64), qps=50.0)
    asked = doors[1].bodies
    assert {len(body["prompt"]) for body in asked} == {128, 128 + 3 + 16, 128 + 3 + 256}, "3 tokens were answered"
    assert {body["max_tokens"] for body in asked} == {128, 32, 64}
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in asked)


async def test_both_endpoints_get_equal_conversations_with_uncached_prompts(
    doors: tuple[PacedEngine, PacedEngine], tmp_path: Path
) -> None:
    for _ in range(2):
        await _build(doors, tmp_path / "t.json", *ONE_CELL)
    first, second = (sorted(len(body["prompt"]) for body in door.bodies) for door in doors)
    assert first == second
    sessions: dict[tuple[int, ...], list[str]] = {}
    for door in doors:
        for body, session in zip(door.bodies, door.sessions, strict=True):
            sessions.setdefault(tuple(body["prompt"][:128]), []).append(session)
    assert all(len(names) == 2 and names[0] == names[1] != "" for names in sessions.values()), "two turns each"
    assert len({names[0] for names in sessions.values()}) == len(sessions)


async def test_rate_is_in_requests_per_second(doors: tuple[PacedEngine, PacedEngine], tmp_path: Path) -> None:
    await _build(doors, tmp_path / "t.json", *ONE_CELL, "--qps", "60", "--seconds", "1")
    assert 40 <= len(doors[1].bodies) <= 80, "30 conversations of two turns"
    table = read_measured(json.loads((tmp_path / "t.json").read_text()))
    assert [entry.qps for entry in table.entries] == [60.0]


@pytest.mark.parametrize(
    ("number", "headers", "named"),
    [
        (
            0,
            {"x-prfaas-route": "remote", "x-prfaas-fallback": "prefill_late"},
            "were not prefilled by a PD-P instance (prefill_late ",
        ),
        (
            1,
            {"x-prfaas-route": "remote", "x-prfaas-reason": "ppd_first_turn"},
            "were not prefilled on the decode node (ppd_first_turn ",
        ),
    ],
)
async def test_endpoint_with_the_wrong_route_is_no_measurement(
    doors: tuple[PacedEngine, PacedEngine], tmp_path: Path, number: int, headers: dict[str, str], named: str
) -> None:
    doors[0].says = {"x-prfaas-route": "remote", "x-prfaas-reason": "static_pd"}
    doors[1].says = {"x-prfaas-route": "local", "x-prfaas-reason": "static_local"}
    assert (await _build(doors, tmp_path / "table.json", *ONE_CELL))[0] == 0
    doors[number].says = headers
    status, error = await _build(doors, tmp_path / "none.json", *ONE_CELL)
    assert (status, named in error, "the cell is left out" in error) == (1, True, True), error


async def test_failing_endpoint_is_no_measurement(doors: tuple[PacedEngine, PacedEngine], tmp_path: Path) -> None:
    doors[0].status = doors[1].status = 500
    out = tmp_path / "table.json"
    await _build(doors, out, *ONE_CELL)
    (entry,) = read_measured(json.loads(out.read_text())).entries
    assert entry.pd_failed, "the decode node is all that is left"
    doors[0].status = 200
    status, errors = await _build(doors, tmp_path / "none.json", *ONE_CELL)
    assert (status, "nothing to decide by" in errors) == (1, True)
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("flags", [["--qps", "-1"], ["--qps", "1,0"], ["--seconds", "0"], ["--vocabulary", "0"]])
def test_invalid_load_is_rejected(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ends = ["--pd", "http://127.0.0.1:9", "--local", "http://127.0.0.1:9", "--model", "m", "--out", "table.json"]
    with pytest.raises(SystemExit) as stopped:
        main(["build", *ends, *flags])
    assert stopped.value.code == 2 and flags[0] in capsys.readouterr().err


def test_unwritable_output_is_noticed_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "table.json"
    ends = ["--pd", "http://127.0.0.1:9", "--local", "http://127.0.0.1:9", "--model", "m", "--out", str(out)]
    assert main(["build", *ends]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error and "QPS" not in error

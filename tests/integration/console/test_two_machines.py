"""Two machines set up by `prfaas init` and run by `prfaas up`: network namespaces, mutual TLS, paced engines."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.console.patient import SYSCTLS
from tests.integration.console.terminal import COMMAND, run, run_here
from tests.support.waiting import wait_until
from tools.reference_tables import ROOT
from tools.wan import FAR, NEAR, Wan, WanShape, obstacle

PROMPT_TOKENS = 17_000  # More than the threshold of 16K.
ASK = """
import json, ssl, sys, urllib.request
url, authority, key = sys.argv[1:4]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
request = urllib.request.Request(url, sys.stdin.read().encode(), headers)
with urllib.request.urlopen(request, timeout=60, context=ssl.create_default_context(cafile=authority)) as response:
    print(json.dumps([json.loads(response.read()), dict(response.headers)]))
"""


def _init(site: str, folder: Path, *flags: str) -> None:
    made = run_here("init", site, str(folder), "--pool", "256MiB", *flags)
    assert made.status == 0, made.error


def _pace(folder: Path, name: str) -> None:
    """Let a paced engine take the place of vLLM."""
    command = [sys.executable, "-m", "tools.paced_engine", "--socket", str(folder / "run/agent.sock")]
    command += ["--instance", name, "--listen", "127.0.0.1:8000"]
    (folder / "engine.sh").write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {shlex.join(command)}\n")


@pytest.fixture
def wan() -> Iterator[Wan]:
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    with Wan(WanShape(1e9, 0.02)) as made:
        yield made


def _run(inside: Sequence[str], *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*inside, *command], input=text, capture_output=True, text=True, env=environment, timeout=200, check=False
    )


def _ask(wan: Wan, west: Path) -> dict[str, str]:
    """Send a new long prompt. Return the headers of the answer."""
    prompt = random.sample(range(10, 10 + 2 * PROMPT_TOKENS), PROMPT_TOKENS)
    key = (west / "api-keys").read_text().strip()
    command = [sys.executable, "-c", ASK, f"https://{NEAR}:8080/v1/completions", str(west / "tls/authority.pem"), key]
    body = json.dumps({"model": "paced", "prompt": prompt, "max_tokens": 4})
    asked = _run(wan.inside("near"), *command, text=body)
    assert asked.returncode == 0, asked.stderr
    headers: dict[str, str] = json.loads(asked.stdout)[1]
    return headers


def _faults(inside: Sequence[str], folder: Path, proc: Path) -> list[Any]:
    examined = _run(inside, *COMMAND, "doctor", "--config", str(folder), "--proc", str(proc))
    return [finding for finding in json.loads(examined.stdout) if finding["outcome"] != "good"]


@pytest.mark.root
@pytest.mark.timeout(900)
def test_two_machines_reach_a_remote_answer_over_mutual_tls(wan: Wan, tmp_path: Path) -> None:
    west, east = tmp_path / "west", tmp_path / "east"
    _init("west", west, "--address", NEAR, "--other", FAR, "--model", "paced")
    (west / "for-east").rename(east)
    _init("east", east)
    _pace(west, "west-0")
    _pace(east, "east-0")
    for name, text in SYSCTLS.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ends = ((wan.inside("far"), east), (wan.inside("near"), west))
    try:
        for inside, folder in ends:
            up = _run(inside, *COMMAND, "up", str(folder), "--within", "120s")
            assert up.returncode == 0, up.stderr
        wait_until(lambda: _ask(wan, west).get("x-prfaas-route") == "remote", what="a remote answer")
        assert [_faults(inside, folder, tmp_path / "proc") for inside, folder in ends] == [[], []]
    finally:
        downs = [_run(inside, *COMMAND, "down", str(folder)) for inside, folder in ends]
    assert [json.loads(down.stdout) for down in downs] == [
        ["engine", "agent"],
        ["router", "engine", "agent", "manager"],
    ]
    assert not [*tmp_path.glob("*/run/*.pid")]


def test_every_settings_file_that_init_writes_is_accepted(tmp_path: Path) -> None:
    _init("east", tmp_path / "e", "--address", "10.0.2.1", "--other", "10.0.1.1", "--model", "org/tiny")
    _init("west", tmp_path / "e/for-west")
    for folder in ("e", "e/for-west"):
        assert run_here("config", "check", "--config", str(tmp_path / folder)).status == 0
    readable = [path for path in tmp_path.rglob("*") if path.suffix == ".key" or "secret" in path.name]
    assert readable and all(path.stat().st_mode & 0o077 == 0 for path in readable)
    assert not (tmp_path / "e/for-west/tls/authority.key").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("init", "west", "new", "--address", "10.0.1.1"), "--model"),
        (("init", "west", "."), "folder"),
        (("up", "."), "init"),
    ],
)
def test_what_init_and_up_cannot_use_is_named(
    arguments: tuple[str, ...], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_here(*arguments)
    assert ran.status == 2
    assert word in ran.error


def test_a_process_that_ends_stops_the_start_with_its_last_words(tmp_path: Path) -> None:
    folder = tmp_path / "east"
    _init("east", folder, "--address", "192.0.2.1", "--other", "192.0.2.2", "--model", "paced")
    ran = run("up", str(folder), "--within", "60s")
    assert ran.status == 2
    assert "192.0.2.1" in ran.error

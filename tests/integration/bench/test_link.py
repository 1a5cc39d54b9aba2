"""`prfaas-bench link` between two processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cli.bench import main

# A shell makes background processes, and what they start, ignore SIGINT.
INTERRUPTIBLE = (
    "import signal; signal.signal(2, signal.default_int_handler); import prfaas.cli.bench as b; b.sys.exit(b.main())"
)
COMMAND = [sys.executable, "-m", "prfaas.cli.bench", "link"]
MODEL = ("--model", "Kimi-Linear-48B-A3B", "--tokens", "4K")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("link") / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def far(secret: Path) -> Iterator[str]:
    line = [*COMMAND, "--listen", "127.0.0.1:0", "--secret-file", str(secret)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
            process.terminate()
            rest, _ = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 0, rest


def measure(far: str, secret: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    line = [*COMMAND, "--to", far, "--secret-file", str(secret), "--repeats", "2", *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)


def test_layers_are_measured_at_once_and_at_the_pace_of_a_prefill(far: str, secret: Path) -> None:
    answer = measure(far, secret, *MODEL, "--profile", "h200-kimi-linear", "--link-rate", "10Gbps", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)
    assert found["num_bytes"] > 1 << 20 and found["checksum_failures"] == 0
    assert found["bytes_per_second"]["median"] > 0 and found["cold_bytes_per_second"] > 0
    assert found["link_ratio"] == pytest.approx(found["bytes_per_second"]["median"] / 1.25e9)
    assert found["prefill_seconds"] > 0 and set(found["exposed_seconds"]) == {"median", "min", "max"}


def test_another_secret_is_refused(far: str, secret: Path, tmp_path: Path) -> None:
    wrong_secret = tmp_path / "other"
    wrong_secret.write_bytes(bytes(32))
    wrong_secret.chmod(0o600)
    answer = measure(far, wrong_secret, *MODEL)
    assert answer.returncode == 1 and answer.stdout == "" and "deployment's secret" in answer.stderr


def test_the_receiver_prints_refused_connections(secret: Path) -> None:
    line = [*COMMAND, "--listen", "127.0.0.1:0", "--secret-file", str(secret)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().split()[-1].split(":")
            with socket.create_connection((host, int(port)), timeout=90) as stranger:
                stranger.sendall(bytes(48))
                assert process.stdout.readline() == "connections rejected so far: magic 1\n"
        finally:
            process.kill()


def test_an_unknown_model_is_refused_in_one_line(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["link", "--to", "127.0.0.1:9", "--secret-file", str(secret), "--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupted_measurement_ends_in_one_line(secret: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(90)
        line = ["link", "--to", f"127.0.0.1:{silent.getsockname()[1]}", "--secret-file", str(secret)]
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                silent.accept()[0].close()  # The measurement has begun.
                process.send_signal(signal.SIGINT)
                output = process.communicate(timeout=90)
            finally:
                process.kill()
    assert process.returncode == 130 and output == ("", "prfaas-bench: interrupted\n")

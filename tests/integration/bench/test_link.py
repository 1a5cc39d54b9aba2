"""`prfaas-bench link` between two processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.cli.bench import main
from prfaas.console.authority import Authority

# A shell makes background processes, and what they start, ignore SIGINT.
INTERRUPTIBLE = (
    "import signal; signal.signal(2, signal.default_int_handler); import prfaas.cli.bench as b; b.sys.exit(b.main())"
)
COMMAND = [sys.executable, "-m", "prfaas.cli.bench", "link"]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("link") / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def far(secret: Path) -> Iterator[str]:
    with far_end(secret) as address:
        yield address


@contextmanager
def far_end(secret: Path, *flags: str) -> Iterator[str]:
    line = [*COMMAND, "--listen", "127.0.0.1:0", "--secret-file", str(secret), "--memory", "8MiB", *flags]
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


def test_equal_layers_are_measured_cold_and_warm(far: str, secret: Path) -> None:
    answer = measure(far, secret, "--layers", "4", "--layer-bytes", "3MiB", "--link-rate", "10Gbps", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)
    assert (found["num_bytes"], found["checksum_failures"]) == (12 << 20, 0)
    assert found["bytes_per_second"]["median"] > 0 and found["cold_bytes_per_second"] > 0
    assert found["link_ratio"] == pytest.approx(found["bytes_per_second"]["median"] / 1.25e9)


def test_layers_of_a_model_leave_at_the_pace_of_its_prefill(far: str, secret: Path) -> None:
    model = ("--model", "Kimi-Linear-48B-A3B", "--tokens", "4K", "--profile", "h200-kimi-linear")
    answer = measure(far, secret, *model, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)
    assert found["prefill_seconds"] > 0 and set(found["exposed_seconds"]) == {"median", "min", "max"}


def test_a_refusal_of_the_receiver_names_the_flag(far: str, secret: Path) -> None:
    answer = measure(far, secret, "--layers", "1", "--layer-bytes", "9MiB")
    assert answer.returncode == 1 and "--memory" in answer.stderr


def test_another_secret_is_refused(far: str, secret: Path, tmp_path: Path) -> None:
    wrong_secret = tmp_path / "other"
    wrong_secret.write_bytes(bytes(32))
    wrong_secret.chmod(0o600)
    answer = measure(far, wrong_secret, "--layers", "1", "--layer-bytes", "1MiB")
    assert answer.returncode == 1 and answer.stdout == "" and "deployment's secret" in answer.stderr


def test_the_receiver_prints_refused_connections(secret: Path) -> None:
    line = [*COMMAND, "--listen", "127.0.0.1:0", "--secret-file", str(secret), "--memory", "8MiB"]
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


def test_too_much_memory_for_the_receiver_is_refused_by_flag(secret: Path) -> None:
    line = [*COMMAND, "--listen", "127.0.0.1:0", "--secret-file", str(secret), "--memory", "1e30"]
    answer = subprocess.run(line, capture_output=True, text=True, timeout=90, check=False)
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1
    assert "prfaas-bench: --memory: " in answer.stderr and "of memory" in answer.stderr


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


def _tls(authority: Authority, name: str) -> tuple[str, ...]:
    issued = authority.issue(name)
    files = {"authority": issued.authority, "certificate": issued.certificate, "key": issued.key}
    return (*(f"--tls-{what}={path}" for what, path in files.items()), "--name", name)


def test_certificates_of_agents_encrypt_the_measurement(secret: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    near = (*_tls(authority, "prefill-1"), "--layers", "2", "--layer-bytes", "1MiB")
    with far_end(secret, *_tls(authority, "decode-1")) as far:
        assert measure(far, secret, *near, "--peer", "decode-1").returncode == 0
        half = measure(far, secret, *near)
        assert half.returncode == 2 and "--peer" in half.stderr
        plain = measure(far, secret, "--layers", "1", "--layer-bytes", "1MiB", "--peer", "decode-1")
        assert plain.returncode == 1 and "require certificates" in plain.stderr

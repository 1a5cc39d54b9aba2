"""`prfaas-profile` against a server of known speed, on a real socket."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.profile import main
from prfaas.errors import ConfigError
from prfaas.solve import endpoint_profile
from prfaas.solve.files import catalog
from prfaas.solve.files.profile_file import read_profile
from tests.support.waiting import POLL_SECONDS

PREFILL_SECONDS, TOKEN_SECONDS = 0.02, 2e-5
STEP_SECONDS, STEP_SECONDS_EACH = 0.01, 0.005


class Engine(BaseHTTPRequestHandler):
    """Prefills in 20 ms and 20 µs a token that it has not seen; steps take 10 ms and 5 ms for each request."""

    protocol_version = "HTTP/1.1"
    num_engines = 2
    seen: set[tuple[int, ...]]
    decoding: list[object]

    def do_GET(self) -> None:
        """Return vLLM's metric of the data-parallel engines."""
        labels = 'cache_dtype="auto",kv_cache_max_concurrency="2.5",kv_cache_size_tokens="20000"'
        page = "".join(
            f'vllm:cache_config_info{{{labels},engine="{index}"}} 1.0\n' for index in range(self.num_engines)
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "known":
            self.send_error(404, "no such model")
            return
        time.sleep(PREFILL_SECONDS + TOKEN_SECONDS * self._uncached(body["prompt"]))
        self.send_response(200)
        if body.get("stream"):
            self._stream(body)
        else:
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    def _uncached(self, prompt: list[int]) -> int:
        cached = max((n for n in (400, 800) if tuple(prompt[:n]) in self.seen), default=0)
        self.seen.add(tuple(prompt))
        return len(prompt) - cached

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_header("Connection", "close")
        self.end_headers()
        self.decoding.append(self)
        for _ in range(body["max_tokens"]):
            self.wfile.write(b"data: {}\n\n")
            self.wfile.flush()
            time.sleep(STEP_SECONDS + STEP_SECONDS_EACH * len(self.decoding))
        self.decoding.remove(self)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Engine.seen, Engine.decoding = set(), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def flags(endpoint: str, file: Path) -> list[str]:
    return ["--endpoint", endpoint, "--model", "known", "--name", "p", "--hardware", "X", "--output", str(file)]


def test_measured_profile_agrees_with_the_engine(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    sizes = "--lengths 500,2K,4K --cached 400,800 --append 500,1K --batches 1,4 --contexts 20 --decode-tokens 12"
    assert main([*flags(endpoint, file), *sizes.split()]) == 0
    profile = read_profile(file)
    assert profile.model == "known" and profile.kv_memory_bytes is None
    assert "--config" in capsys.readouterr().err, "the catalog does not have this model"
    assert _may_be(profile.prefill.seconds(3000), PREFILL_SECONDS + 3000 * TOKEN_SECONDS)
    assert _may_be(profile.prefill.seconds(800, 600), PREFILL_SECONDS + 800 * TOKEN_SECONDS)
    assert profile.decode is not None
    assert _may_be(profile.decode.step_seconds(4, 20), STEP_SECONDS + 4 * STEP_SECONDS_EACH)
    assert "prfaas-profile" in profile.source


def test_kv_memory_is_what_the_engines_report_for_their_model(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    sizes = ["--lengths", "500,1K,2K", "--batches", "1,2", "--contexts", "20", "--repeats", "3"]
    assert main([*flags(endpoint, file), *sizes, "--config", "Qwen3-Next"]) == 0
    profile, model = read_profile(file), catalog.find_model("Qwen3-Next")
    assert (profile.model, profile.kv_memory_bytes) == (model.name, round(5 * model.kv_bytes(8000)))


def test_an_engine_that_does_not_state_its_kv_memory_is_named_as_the_cause(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "num_engines", 0)
    sizes = ["--lengths", "500,1K,2K", "--batches", "1,2", "--contexts", "20", "--repeats", "3"]
    assert main([*flags(endpoint, tmp_path / "p.yaml"), *sizes, "--config", "Qwen3-Next"]) == 0
    assert "/metrics" in capsys.readouterr().err


def _may_be(measured: float, true: float) -> bool:
    """Nobody answers sooner than it sleeps, but for the first steps of a batch; a busy machine may answer later."""
    return 0.75 * true <= measured <= 4 * true


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--model", "other"], "status 404"),
        (["--endpoint", "http://127.0.0.1:1"], "refused"),
        (["--endpoint", "localhost"], "http://host:port"),
        (["--lengths", "2KB"], "KB"),
        (["--batches", "0"], "at least 1"),
        (["--repeats", "0"], "at least 3"),
        (["--vocabulary", "5"], "vocabulary 5"),
        (["--config", "none"], "no such model"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(
    endpoint: str, capsys: pytest.CaptureFixture[str], changed: list[str], named: str
) -> None:
    arguments = ["--endpoint", endpoint, "--model", "known", "--name", "p", "--hardware", "X", *changed]
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert (status, error.count("\n"), named in error) == (2, 1, True), error


class _BreaksOff(BaseHTTPRequestHandler):
    """Begins an answer and closes the connection."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\ndat")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def test_incomplete_response_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _BreaksOff) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        status = main(["--endpoint", url, "--model", "m", "--name", "p", "--hardware", "X"])
        server.shutdown()
        thread.join()
    assert status == 2 and "ended early" in capsys.readouterr().err


class _Killed(BaseException):
    """Stands for a signal."""


def test_a_run_that_was_killed_is_continued(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.yaml"
    sizes = ["--lengths", "500,1K,2K", "--batches", "1,2", "--contexts", "20", "--repeats", "3"]
    real, asked = endpoint_profile.measure_point, []

    def until_the_third(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[1])
        if len(asked) == 3:
            raise _Killed
        return real(*arguments, **options)

    monkeypatch.setattr(endpoint_profile, "measure_point", until_the_third)
    with pytest.raises(_Killed):
        main([*flags(endpoint, file), *sizes])
    assert not file.exists()
    assert main([*flags(endpoint, file), *sizes]) == 0
    # Two prefills were kept; the third and the steps were measured again.
    assert len(asked) == 3 + 3
    assert read_profile(file).decode is not None
    assert list(tmp_path.iterdir()) == [file]


def test_a_batch_that_starts_slowly_decodes_for_longer(endpoint: str, tmp_path: Path) -> None:
    """Prompts of 2,000 tokens take 60 ms each; a batch of eight ends its 12 tokens before the last one has begun."""
    file = tmp_path / "p.yaml"
    sizes = ["--lengths", "500,1K,2K", "--batches", "1,8", "--contexts", "2K", "--decode-tokens", "12"]
    assert main([*flags(endpoint, file), *sizes, "--repeats", "3"]) == 0
    assert read_profile(file).decode is not None


def test_a_point_that_fails_is_left_out(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    sizes = ["--lengths", "500,1K,2K", "--batches", "1,2", "--contexts", "20,5", "--repeats", "3"]
    real = endpoint_profile.measure_point

    def fails_at_a_context(made: Any, point: endpoint_profile.Point, *rest: Any, **options: Any) -> Any:
        if point.tokens == 5:
            raise ConfigError("out of memory")
        return real(made, point, *rest, **options)

    monkeypatch.setattr(endpoint_profile, "measure_point", fails_at_a_context)
    assert main([*flags(endpoint, file), *sizes]) == 1
    assert "2 points failed" in capsys.readouterr().err
    assert read_profile(file).decode is not None
    assert (tmp_path / "p.partial.json").is_file()

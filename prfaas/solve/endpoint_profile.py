"""Measurement of a profile on a running OpenAI-compatible endpoint: prefill by length, appends, decode steps."""

import http.client
import itertools
import json
import math
import random
import re
import statistics
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

# A prompt of 128K tokens on one slow GPU takes less.
_TIMEOUT_SECONDS = 600.0
# Tokenizers keep their special tokens below this id.
_FIRST_TOKEN_ID = 10
# A mean whose standard error is this part of it is measured well enough.
_ENOUGH = 0.006
# Fewer samples may agree by chance.
_LEAST = 5
# Samples that differ more from the median are accidents.
_OUTLIER = 0.25
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Point:
    """Point to measure: a prefill of `tokens` behind `cached` tokens, or with a `batch` a decode step at a context."""

    tokens: int
    cached: int = 0
    batch: int = 0

    @property
    def key(self) -> str:
        """Return the point's name in the file of partial results."""
        return f"{self.tokens}/{self.cached}/{self.batch}"


@dataclass(frozen=True)
class Measurement:
    """Mean seconds of a point, and their standard error."""

    seconds: float
    error: float


@dataclass(frozen=True)
class KvCapacity:
    """Number of requests of `num_tokens` whose KV fits an instance. `dtype` is vLLM's name of the cache dtype."""

    num_requests: float
    num_tokens: float
    dtype: str


class EngineEndpoint:
    """Engine under measurement. Prompts are random token ids, so that nothing is cached by accident."""

    def __init__(self, url: str, *, model: str, vocabulary: int, seed: int = 0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--endpoint {url!r}: write http://host:port")
        self._parts = parts
        self._model = model
        if vocabulary <= _FIRST_TOKEN_ID:
            raise ConfigError(f"vocabulary {vocabulary}: must be above {_FIRST_TOKEN_ID}, the lowest token id used")
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        """Return random token ids."""
        return [self._random.randrange(_FIRST_TOKEN_ID, self._vocabulary) for _ in range(num_tokens)]

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """Return the seconds from sending a prompt to receiving its only token."""
        started = time.perf_counter()
        for _ in self._response_lines(prompt, max_tokens=1):
            pass
        return time.perf_counter() - started

    def token_times(self, prompt: Sequence[int], num_tokens: int) -> list[float]:
        """Return the moments at which `num_tokens` output tokens arrive."""
        lines = self._response_lines(prompt, max_tokens=num_tokens, stream=True, ignore_eos=True, min_tokens=num_tokens)
        # The closing event carries no token.
        return [time.perf_counter() for line in lines if line.startswith(b"data:") and line.strip() != b"data: [DONE]"]

    def kv_capacity(self) -> KvCapacity | None:
        """Return the KV capacity of all data-parallel engines from vLLM's metrics; None if there is no such metric."""
        try:
            with urllib.request.urlopen(self._parts.geturl().rstrip("/") + "/metrics", timeout=10) as answer:
                lines = answer.read().decode(errors="replace").splitlines()
        except (OSError, http.client.HTTPException):
            return None
        engines = [dict(_LABEL.findall(line)) for line in lines if line.startswith("vllm:cache_config_info{")]
        try:
            each = float(engines[0]["kv_cache_max_concurrency"])
            num_tokens = float(engines[0]["kv_cache_size_tokens"]) / each
            return KvCapacity(len(engines) * each, num_tokens, engines[0]["cache_dtype"])
        except (IndexError, KeyError, ValueError, ZeroDivisionError):
            return None

    def _response_lines(self, prompt: Sequence[int], **options: Any) -> Iterator[bytes]:
        """Yield the lines of one completion as they arrive. Failures of the endpoint are raised as ConfigError."""
        parts, url = self._parts, self._parts.geturl()
        body = json.dumps({"model": self._model, "prompt": list(prompt), "temperature": 0.0, **options})
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with closing(connect(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)) as connection:
            try:
                path = parts.path.rstrip("/") + "/v1/completions"
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"{url}: {error}") from error
            if response.status != 200:
                text = response.read(300).decode(errors="replace")
                raise ConfigError(f"{url}: status {response.status}: {text}")
            try:
                yield from response
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"{url}: the response ended early: {error!r}") from error


class Measurements:
    """Results by point, kept in a file as they come, so that a run that ends early is continued."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, dict(settings)
        self.found: dict[str, Measurement] = {}
        if path is not None and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] == self._settings:
                self.found = {key: Measurement(**value) for key, value in kept["points"].items()}

    def add(self, point: Point, measured: Measurement) -> None:
        """Keep a result."""
        self.found[point.key] = measured
        if self._path is not None:
            points = {key: asdict(value) for key, value in self.found.items()}
            self._path.write_text(json.dumps({"settings": self._settings, "points": points}), encoding="utf-8")

    def close(self) -> None:
        """Remove the file, since the profile is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def repeated(sample: Callable[[], float], *, most: int) -> Measurement:
    """Return the mean of as many samples as its standard error needs to be small, at most `most`.

    Samples far from the median, such as the first of a new shape that an engine compiles, are left out.
    """
    values: list[float] = []
    while True:
        values.append(sample())
        middle = statistics.median(values)
        close = [value for value in values if abs(value / middle - 1.0) <= _OUTLIER]
        if len(close) >= min(_LEAST, most):
            mean = statistics.fmean(close)
            error = statistics.stdev(close) / math.sqrt(len(close))
            if error <= _ENOUGH * mean or len(values) >= most:
                return Measurement(mean, error)
        elif len(values) >= most:
            return Measurement(middle, 0.0)


def measure_point(
    endpoint: EngineEndpoint, point: Point, results: Measurements, *, most: int, decode_tokens: int
) -> Measurement:
    """Measure a prefill, an append or a decode step.

    Raises:
        ConfigError: the endpoint fails, or a batch never decodes together.
    """
    if point.batch:
        return _step(endpoint, point, decode_tokens + _tokens_while_others_start(point, results))
    prefix = endpoint.prompt(point.cached)
    if point.cached:
        endpoint.prefill_seconds(prefix)
    return repeated(lambda: endpoint.prefill_seconds(prefix + endpoint.prompt(point.tokens)), most=most)


def _tokens_while_others_start(point: Point, results: Measurements) -> int:
    """Return the tokens that the first request of a batch decodes until the last one has been prefilled."""
    prefills, steps = [], []
    for key, measured in results.found.items():
        tokens, cached, batch = map(int, key.split("/"))
        if batch:
            steps.append(measured.seconds)
        elif not cached:
            prefills.append(measured.seconds * max(1.0, point.tokens / tokens))
    if not prefills or not steps:
        return 0
    return math.ceil(point.batch * min(prefills) / min(steps))


def _step(endpoint: EngineEndpoint, point: Point, num_tokens: int) -> Measurement:
    """Measure the gaps while all requests of a batch decode: from the latest first to the earliest last token."""
    prompts = [endpoint.prompt(point.tokens) for _ in range(point.batch)]
    arrivals: list[list[float]] = [[] for _ in prompts]
    failures: list[ConfigError] = []

    def run(index: int) -> None:
        try:
            arrivals[index] = endpoint.token_times(prompts[index], num_tokens)
        except ConfigError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(point.batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    begin, end = max(times[0] for times in arrivals if times), min(times[-1] for times in arrivals if times)
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times) if a >= begin and b <= end]
    if not gaps:
        raise ConfigError(f"a batch of {point.batch} never decoded together for a whole step; raise --decode-tokens")
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return Measurement(statistics.median(gaps), error)

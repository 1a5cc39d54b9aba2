"""Measurement of a profile on a running OpenAI-compatible endpoint: prefill by length, appends, decode steps."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import statistics
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from prfaas.errors import ConfigError

# A prompt of 128K tokens on one slow GPU takes less.
_TIMEOUT_SECONDS = 600.0
# Tokenizers keep their special tokens below this id.
_FIRST_TOKEN_ID = 10


@dataclass(frozen=True)
class PrefillMeasurement:
    """Median prefill seconds of `tokens` new tokens behind `cached` ones."""

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True)
class StepMeasurement:
    """Median seconds between the tokens of `batch` requests that decode at once."""

    batch: int
    context: int
    step: float


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


def measure_prefill(endpoint: EngineEndpoint, lengths: Sequence[int], *, repeats: int) -> list[PrefillMeasurement]:
    """Measure T_prefill at each length with nothing cached."""
    # The first request of an engine compiles and warms up.
    endpoint.prefill_seconds(endpoint.prompt(min(lengths)))
    measurements = []
    for length in lengths:
        seconds = [endpoint.prefill_seconds(endpoint.prompt(length)) for _ in range(repeats)]
        measurements.append(PrefillMeasurement(length, 0, statistics.median(seconds)))
    return measurements


def measure_appends(
    endpoint: EngineEndpoint, lengths: Sequence[int], cached: Sequence[int], *, repeats: int
) -> list[PrefillMeasurement]:
    """Measure T_prefill(m | n): send each prefix once, then prompts that continue it."""
    times = []
    for prefix_length in cached:
        prefix = endpoint.prompt(prefix_length)
        endpoint.prefill_seconds(prefix)
        for length in lengths:
            seconds = [endpoint.prefill_seconds(prefix + endpoint.prompt(length)) for _ in range(repeats)]
            times.append(PrefillMeasurement(length, prefix_length, statistics.median(seconds)))
    return times


def measure_decode(
    endpoint: EngineEndpoint, batches: Sequence[int], contexts: Sequence[int], *, num_tokens: int
) -> list[StepMeasurement]:
    """Measure T_decode at each batch and context."""
    return [_step(endpoint, batch, context, num_tokens) for context in contexts for batch in batches]


def _step(endpoint: EngineEndpoint, batch: int, context: int, num_tokens: int) -> StepMeasurement:
    """Measure the gaps while all requests of a batch decode: from the latest first to the earliest last token."""
    prompts = [endpoint.prompt(context) for _ in range(batch)]
    arrivals: list[list[float]] = [[] for _ in prompts]
    failures: list[ConfigError] = []

    def run(index: int) -> None:
        try:
            arrivals[index] = endpoint.token_times(prompts[index], num_tokens)
        except ConfigError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    begin, end = max(times[0] for times in arrivals if times), min(times[-1] for times in arrivals if times)
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times) if a >= begin and b <= end]
    if not gaps:
        raise ConfigError(f"a batch of {batch} never decoded together for a whole step; raise --decode-tokens")
    return StepMeasurement(batch, context, statistics.median(gaps))

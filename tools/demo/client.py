"""What the demo asks over HTTP: completions as streams with their token ids, and the agents' transfer pages."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

REQUEST_SECONDS = 120.0
PAGE_SECONDS = 30.0  # for a page of a process that shares its cores with engines


@dataclass(frozen=True)
class Answer:
    """One finished completion: its tokens, its headers, seconds from request to first token, and where the request asked for
    `logprobs` the natural logarithm of each token's probability.
    """

    token_ids: tuple[int, ...]
    headers: dict[str, str]
    ttft_seconds: float
    log_probabilities: tuple[float, ...] = ()


def complete(url: str, body: dict[str, Any], *, headers: dict[str, str] | None = None) -> Answer:
    """Stream a completion.

    Raises:
        RuntimeError: the server answered with an error, or the stream ended early.
    """
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=REQUEST_SECONDS)
    payload = json.dumps({**body, "stream": True, "return_token_ids": True})
    started = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read(2000).decode(errors='replace')}")
        headers_there = {name.lower(): value for name, value in response.getheaders()}
        return _read_stream(response, headers_there, started)
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, headers: dict[str, str], started: float) -> Answer:
    token_ids: list[int] = []
    log_probabilities: list[float] = []
    ttft: float | None = None
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return Answer(tuple(token_ids), headers, ttft or 0.0, tuple(log_probabilities))
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(json.dumps(event["error"]))
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            if new and ttft is None:
                ttft = time.monotonic() - started
            token_ids += new
            log_probabilities += (choice.get("logprobs") or {}).get("token_logprobs") or []
    raise RuntimeError(f"the stream ended after {len(token_ids)} tokens without [DONE]")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as response:
        return json.load(response)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as response:
        return str(response.read().decode())


def prefilled_tokens(engine_url: str) -> int:
    """Prompt tokens that an engine has computed since its start: those it was given, less those it could load."""
    given, loaded = 0.0, 0.0
    for line in get_text(f"{engine_url}/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:prompt_tokens_total"):
            given += float(value)
        elif name.startswith(("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")):
            loaded += float(value)
    return int(given - loaded)


def is_answering(url: str) -> bool:
    """Whether GET `url` is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def transfers(agent_url: str) -> dict[str, dict[str, Any]]:
    """The transfers that an agent remembers, by id."""
    return {record["transfer_id"]: record for record in get_json(f"{agent_url}/transfers")}


def prompt_tokens(length: int, *, seed: int, vocabulary: range) -> list[int]:
    """A prompt of `length` token ids that no other seed shares a block with."""
    source = random.Random(seed)
    return [source.choice(vocabulary) for _ in range(length)]

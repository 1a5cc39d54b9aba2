"""HTTP client for streamed completions with token ids, and for status pages."""

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
PAGE_SECONDS = 30.0  # The process may share its cores with engines.


@dataclass(frozen=True)
class Answer:
    """Finished completion. `log_probabilities` are empty unless the request has `logprobs`."""

    token_ids: tuple[int, ...]
    headers: dict[str, str]
    ttft_seconds: float
    log_probabilities: tuple[float, ...] = ()
    text: str = ""


def complete(url: str, body: dict[str, Any], *, headers: dict[str, str] | None = None) -> Answer:
    """Send a completion request and read its stream.

    Raises:
        RuntimeError: The server answered with an error, or the stream ended early.
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
        response_headers = {name.lower(): value for name, value in response.getheaders()}
        return _read_stream(response, response_headers, started)
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, headers: dict[str, str], started: float) -> Answer:
    token_ids: list[int] = []
    log_probabilities: list[float] = []
    text = ""
    ttft: float | None = None
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return Answer(tuple(token_ids), headers, ttft or 0.0, tuple(log_probabilities), text)
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(json.dumps(event["error"]))
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            if new and ttft is None:
                ttft = time.monotonic() - started
            token_ids += new
            text += choice.get("text") or ""
            log_probabilities += (choice.get("logprobs") or {}).get("token_logprobs") or []
    raise RuntimeError(f"the stream ended after {len(token_ids)} tokens without [DONE]")


def get_json(url: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as response:
        return json.load(response)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PAGE_SECONDS) as response:
        return str(response.read().decode())


def prefilled_tokens(engine_url: str) -> int:
    """Return the prompt tokens that an engine has computed since its start, without loaded tokens."""
    given, loaded = 0.0, 0.0
    for line in get_text(f"{engine_url}/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:prompt_tokens_total"):
            given += float(value)
        elif name.startswith(("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")):
            loaded += float(value)
    return int(given - loaded)


def is_answering(url: str) -> bool:
    """Return True if GET `url` answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def transfers(agent_url: str) -> dict[str, dict[str, Any]]:
    """Return the transfers that an agent remembers, by id."""
    return {record["transfer_id"]: record for record in get_json(f"{agent_url}/transfers")}


def prompt_tokens(length: int, *, seed: int, vocabulary: range) -> list[int]:
    """Return a prompt of `length` token ids that shares no block with another seed."""
    source = random.Random(seed)
    return [source.choice(vocabulary) for _ in range(length)]

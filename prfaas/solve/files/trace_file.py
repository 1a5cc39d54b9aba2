"""Traffic recorded in a file: CSV, JSONL (also Mooncake's public traces), conversations as ShareGPT and WildChat have them."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.errors import ConfigError
from prfaas.model.cost.lengths import Empirical
from prfaas.model.cost.workload import LaterTurns, OutputTokens, Workload

MOONCAKE_BLOCK_TOKENS = 512  # one hash id of a Mooncake trace stands for so many tokens
_CHARACTERS_PER_TOKEN = 4  # for conversations without token counts
_DEFAULT_OUTPUT_TOKENS = 1024.0

# What each column may be called; timestamps only have to be in order.
_COLUMNS = {
    "prompt": ("input_length", "prompt_tokens", "num_prompt_tokens", "input_tokens", "length", "tokens"),
    "output": ("output_length", "output_tokens", "num_output_tokens", "completion_tokens"),
    "cached": ("cached_tokens", "num_cached_tokens"),
    "timestamp": ("timestamp", "time", "arrival", "arrived_at"),
    "turn": ("turn", "turn_index"),
}
_MESSAGES = ("conversations", "conversation", "messages")  # ShareGPT's, WildChat's and the OpenAI API's name


@dataclass(frozen=True)
class Request:
    """One line of a trace; `turn` counts from 1. `blocks` are the hash ids of a Mooncake trace."""

    prompt_tokens: float
    output_tokens: float | None
    cached_tokens: float
    timestamp: float | None
    turn: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> Workload:
    """Return the workload of a recorded trace; its prefix hits count.

    Raises:
        ConfigError: as `read_requests` does.
    """
    requests, inferred = read_requests(path)
    return workload_of(requests, name=path.name, inferred=inferred)


def read_requests(path: Path) -> tuple[list[Request], tuple[str, ...]]:
    """Return the requests of a recorded trace in its order, and what of them was inferred.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line makes no sense; it names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    inferred: tuple[str, ...] = ()
    if path.suffix == ".json":
        requests, inferred = _conversations(text, path)
    elif path.suffix == ".csv":
        requests = [request for request, _ in _requests(_csv_fields(text, path), path)]
    else:
        requests, inferred = _lines(list(_jsonl_fields(text, path)), path)
    _check(requests, path)
    return requests, inferred


def workload_of(requests: list[Request], *, name: str, inferred: tuple[str, ...] = ()) -> Workload:
    """Return the workload that these requests are a sample of."""
    cached = np.array([request.cached_tokens for request in requests])
    new = np.maximum(np.array([request.prompt_tokens for request in requests]) - cached, 1.0)
    later = np.array([request.turn > 1 for request in requests])
    outputs = [request.output_tokens for request in requests if request.output_tokens is not None]
    if not outputs:
        inferred = (*inferred, f"output tokens ({_DEFAULT_OUTPUT_TOKENS:.0f} each)")
    if not later.any() or later.all():
        return Workload(name, Empirical(new, cached), _output(requests), inferred=inferred)
    turns = LaterTurns(float(later.mean()), Empirical(new[later], cached[later]))
    return Workload(name, Empirical(new[~later], cached[~later]), _output(requests), turns, inferred)


def _output(requests: list[Request]) -> OutputTokens:
    """Moments of the output; the mean context weighs each request by how long it decodes."""
    outputs = np.array([_DEFAULT_OUTPUT_TOKENS if r.output_tokens is None else r.output_tokens for r in requests])
    prompts = np.array([request.prompt_tokens for request in requests])
    mean = float(outputs.mean())
    context = float((prompts + outputs / 2) @ outputs / outputs.sum())
    return OutputTokens(mean, float(outputs.var()) / mean**2, context)


def _csv_fields(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.reader(text.splitlines())
    header = next(rows, None)
    if header is None:
        return
    names = [name.strip() for name in header]
    if len(names) == 1 and _is_number(names[0]):
        names, first = ["length"], names
        yield 1, {"length": first[0]}
    if not set(names) & set(_COLUMNS["prompt"]):
        raise ConfigError(f"{path} line 1: none of the columns {', '.join(_COLUMNS['prompt'])}")
    for line, row in enumerate(rows, start=2):
        if row:
            yield line, dict(zip(names, row, strict=False))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _jsonl_fields(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{path} line {line}: not JSON: {error}") from error
        if isinstance(fields, int | float) and not isinstance(fields, bool):
            fields = {"length": fields}
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} line {line}: an object or a number is expected")
        yield line, fields


def _requests(rows: Iterable[tuple[int, Mapping[str, Any]]], path: Path) -> Iterator[tuple[Request, Mapping[str, Any]]]:
    """Yield each line as a request, beside its fields; what the columns are called is looked up when it changes."""
    known: Set[str] = set()
    for line, fields in rows:
        if fields.keys() != known:
            known, called = set(fields), _called(fields, path, line)
        yield _request(fields, called, path, line), fields


def _called(fields: Mapping[str, Any], path: Path, line: int) -> dict[str, str]:
    """What this line calls each column that it has."""
    called = {name: key for name, keys in _COLUMNS.items() for key in reversed(keys) if key in fields}
    if "prompt" not in called:
        raise ConfigError(f"{path} line {line}: none of {', '.join(_COLUMNS['prompt'])}")
    return called


def _request(fields: Mapping[str, Any], called: Mapping[str, str], path: Path, line: int) -> Request:
    values = {name: _number(fields[key], name, f"{path} line {line}: {key}") for name, key in called.items()}
    prompt, cached = values["prompt"], values.get("cached") or 0.0
    if prompt is None:
        raise ConfigError(f"{path} line {line}: {called['prompt']}: empty")
    cached = min(cached, prompt - 1)  # the last token is always computed
    return Request(prompt, values.get("output"), cached, values.get("timestamp"), int(values.get("turn") or 1))


def _number(written: Any, name: str, where: str) -> float | None:
    """Return a column's number; token counts are at least 1, nothing is negative, empty cells are None."""
    if written is None or written == "":
        return None
    try:
        value = float(written)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {written!r} is not a number") from None
    least = 1.0 if name in ("prompt", "output", "turn") else 0.0
    if not least <= value < math.inf:
        raise ConfigError(f"{where}: {written!r} is not a finite number of at least {least:.0f}")
    return value


def _with_hash_ids(rows: Iterable[tuple[Request, Mapping[str, Any]]]) -> Iterator[Request]:
    """Mooncake's hash ids turned into prefix hits: a block is cached once any earlier request brought it."""
    seen: set[Any] = set()
    for request, fields in rows:
        ids = fields.get("hash_ids")
        if not isinstance(ids, list):
            yield request
            continue
        known = next((index for index, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
        cached = min(known * MOONCAKE_BLOCK_TOKENS, request.prompt_tokens - 1)
        yield replace(request, cached_tokens=max(cached, 0.0), blocks=tuple(ids))


def _lines(rows: list[tuple[int, Mapping[str, Any]]], path: Path) -> tuple[list[Request], tuple[str, ...]]:
    """Return a request for each line; or, as WildChat has it, a conversation for each: {"conversation": [...]}."""
    if not rows or _messages(rows[0][1]) is None:
        return list(_with_hash_ids(_requests(rows, path))), ()
    return _listed([fields for _, fields in rows], path)


def _messages(entry: Any) -> list[Any] | None:
    """What a conversation holds, under one of the names that it has in public data."""
    named = (entry.get(name) for name in _MESSAGES) if isinstance(entry, dict) else ()
    return next((messages for messages in named if isinstance(messages, list)), None)


def _conversations(text: str, path: Path) -> tuple[list[Request], tuple[str, ...]]:
    """ShareGPT-like: a list of {"conversations": [{"from": "human" | "gpt", "value": ...}]}."""
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: a list of conversations is expected")
    return _listed(listed, path)


def _listed(listed: Sequence[Any], path: Path) -> tuple[list[Request], tuple[str, ...]]:
    requests = [request for index, entry in enumerate(listed) for request in _turns(entry, path, index)]
    counted = f"token counts of {path.name} ({_CHARACTERS_PER_TOKEN} characters each, where it has none)"
    return requests, (counted,)


def _turns(entry: Any, path: Path, index: int) -> Iterator[Request]:
    """Yield a request for each message of the user that has an answer; what was said before is cached."""
    messages = _messages(entry)
    if messages is None:
        raise ConfigError(f"{path} conversation {index + 1}: no list named {' or '.join(_MESSAGES)}")
    held, asked, turn = 0.0, 0.0, 0
    for message in messages:
        tokens = _message_tokens(message, path, index)
        if message.get("from", message.get("role")) not in ("gpt", "assistant"):
            asked += tokens
        elif asked:
            turn += 1
            yield Request(held + asked, tokens, held, None, turn)
            held, asked = held + asked + tokens, 0.0


def _message_tokens(message: Any, path: Path, index: int) -> float:
    if not isinstance(message, dict):
        raise ConfigError(f"{path} conversation {index + 1}: a message is no object")
    if "num_tokens" in message:
        return _number(message["num_tokens"], "prompt", f"{path} conversation {index + 1}: num_tokens") or 1.0
    text = message.get("value", message.get("content"))
    if not isinstance(text, str):
        raise ConfigError(f"{path} conversation {index + 1}: a message has no text")
    return float(max(-(-len(text) // _CHARACTERS_PER_TOKEN), 1))


def _check(requests: list[Request], path: Path) -> None:
    if not requests:
        raise ConfigError(f"{path}: no requests")
    stamps = [request.timestamp for request in requests if request.timestamp is not None]
    for earlier, later in itertools.pairwise(stamps):
        if later < earlier:
            raise ConfigError(f"{path}: timestamps are not in order: {later:g} follows {earlier:g}")
    if len({(request.prompt_tokens, request.cached_tokens) for request in requests}) == 1:
        raise ConfigError(
            f"{path}: every request has {requests[0].prompt_tokens:.0f} tokens; no threshold splits one length"
        )

"""Traffic to plan for: a recorded trace, or a description in one line.

Files are CSV, JSONL (including Mooncake's public traces), or conversations in the forms of ShareGPT and WildChat.
A description is text such as "lognormal:mu=9.9,sigma=1,min=128,max=128Ki,output=1024".
"""

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prfaas import config
from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.model.cost.lengths import Lengths, log_normal, mixture
from prfaas.model.cost.workload import OutputTokens, Workload, with_context
from prfaas.solve.files.quantities import NUMBER
from prfaas.units import parse_ratio

# Each hash id of a Mooncake trace represents this many tokens.
MOONCAKE_BLOCK_TOKENS = 512
# Conversations without token counts are estimated at this ratio.
_CHARACTERS_PER_TOKEN = 4
_DEFAULT_OUTPUT_TOKENS = 1024.0

# Accepted names of each column; timestamps only have to be in order.
_COLUMNS = {
    "prompt": ("input_length", "prompt_tokens", "num_prompt_tokens", "input_tokens", "length", "tokens"),
    "output": ("output_length", "output_tokens", "num_output_tokens", "completion_tokens"),
    "cached": ("cached_tokens", "num_cached_tokens"),
    "timestamp": ("timestamp", "time", "arrival", "arrived_at"),
    "turn": ("turn", "turn_index"),
}
# ShareGPT, WildChat and the OpenAI API name the list of messages differently.
_MESSAGES = ("conversations", "conversation", "messages")


@dataclass(frozen=True)
class TraceRequest:
    """Request of a trace; `turn` counts from 1. `blocks` are the hash ids of a Mooncake trace."""

    prompt_tokens: float
    output_tokens: float | None
    cached_tokens: float
    timestamp: float | None
    turn: int
    blocks: tuple[int, ...] = ()


def find_trace(text: str, *, beside: Path | None) -> Workload:
    """Return the workload of a one-line description or of a file, relative to `beside`.

    Raises:
        ConfigError: the text is neither, or is malformed.
    """
    if text.partition(":")[0].strip() == "lognormal":
        return parse_spec(text)
    path = Path(text).expanduser()
    path = path if beside is None or path.is_absolute() else beside / path
    return read_trace(path) if path.exists() else parse_spec(text)


def read_trace(path: Path) -> Workload:
    """Return the workload of a recorded trace, including its prefix hits.

    Raises:
        ConfigError: as in `read_requests`.
    """
    requests, inferred = read_requests(path)
    return workload_of(requests, name=path.name, inferred=inferred)


def read_requests(path: Path) -> tuple[list[TraceRequest], tuple[str, ...]]:
    """Return the requests of a recorded trace in order, and the names of inferred properties.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a malformed line; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    inferred: tuple[str, ...] = ()
    if path.suffix == ".json":
        requests, inferred = _conversations(text, path)
    elif path.suffix == ".csv" and not text[:1].isdigit():
        requests = list(_requests(_csv_fields(text), path))
    else:
        requests, inferred = _lines(list(_jsonl_fields(text, path)), path)
    _check(requests, path)
    return requests, inferred


def workload_of(requests: list[TraceRequest], *, name: str, inferred: tuple[str, ...] = ()) -> Workload:
    """Return the workload that these requests sample."""
    cached = np.array([request.cached_tokens for request in requests])
    new = np.maximum(np.array([request.prompt_tokens for request in requests]) - cached, 1.0)
    outputs = [request.output_tokens for request in requests if request.output_tokens is not None]
    if not outputs:
        inferred = (*inferred, f"output tokens ({_DEFAULT_OUTPUT_TOKENS:.0f} each)")
    return Workload(name, Lengths(new, cached), _output(requests), inferred)


def _output(requests: list[TraceRequest]) -> OutputTokens:
    """Return the moments of the output; the mean context weighs each request by its decode time."""
    outputs = np.array([_DEFAULT_OUTPUT_TOKENS if r.output_tokens is None else r.output_tokens for r in requests])
    prompts = np.array([request.prompt_tokens for request in requests])
    mean = float(outputs.mean())
    context = float((prompts + outputs / 2) @ outputs / outputs.sum())
    return OutputTokens(mean, float(outputs.var()) / mean**2, context)


def _csv_fields(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    for row in rows:
        yield rows.line_num, row


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


def _requests(rows: Iterable[tuple[int, Mapping[str, Any]]], path: Path) -> Iterator[TraceRequest]:
    """Yield each line as a request. Column names are looked up again only when the fields change."""
    known: Set[str] = set()
    for line, fields in rows:
        if fields.keys() != known:
            known, keys = set(fields), _column_keys(fields, path, line)
        yield _request(fields, keys, path, line)


def _column_keys(fields: Mapping[str, Any], path: Path, line: int) -> dict[str, str]:
    """Return the key of each column that this line has."""
    keys = {name: key for name, accepted in _COLUMNS.items() for key in reversed(accepted) if key in fields}
    if "prompt" not in keys:
        raise ConfigError(f"{path} line {line}: none of {', '.join(_COLUMNS['prompt'])}")
    return keys


def _request(fields: Mapping[str, Any], keys: Mapping[str, str], path: Path, line: int) -> TraceRequest:
    values = {name: _number(fields[key], name, f"{path} line {line}: {key}") for name, key in keys.items()}
    prompt, cached = values["prompt"], values.get("cached") or 0.0
    if prompt is None:
        raise ConfigError(f"{path} line {line}: {keys['prompt']}: empty")
    # The last token is always computed.
    cached = min(cached, prompt - 1)
    turn, ids = int(values.get("turn") or 1), fields.get("hash_ids")
    blocks = tuple(ids) if isinstance(ids, list) else ()
    return TraceRequest(prompt, values.get("output"), cached, values.get("timestamp"), turn, blocks)


def _number(written: Any, name: str, where: str) -> float | None:
    """Return a column's number, or None for an empty cell. Token counts are at least 1, other numbers at least 0."""
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


def _with_hits(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Turn Mooncake's hash ids into prefix hits: a block is cached once an earlier request contained it."""
    seen: set[int] = set()
    for request in requests:
        if request.blocks:
            hits = sum(1 for _ in itertools.takewhile(seen.__contains__, request.blocks))
            seen.update(request.blocks)
            cached = min(hits * MOONCAKE_BLOCK_TOKENS, request.prompt_tokens - 1)
            request = replace(request, cached_tokens=cached)
        yield request


def _lines(rows: list[tuple[int, Mapping[str, Any]]], path: Path) -> tuple[list[TraceRequest], tuple[str, ...]]:
    """Return the requests of lines that hold one request each, or one conversation each as in WildChat."""
    if not rows or _messages(rows[0][1]) is None:
        return list(_with_hits(_requests(rows, path))), ()
    return _listed([fields for _, fields in rows], path)


def _messages(entry: Any) -> list[Any] | None:
    """Return the messages of a conversation, under any of the names in public data."""
    named = (entry.get(name) for name in _MESSAGES) if isinstance(entry, dict) else ()
    return next((messages for messages in named if isinstance(messages, list)), None)


def _conversations(text: str, path: Path) -> tuple[list[TraceRequest], tuple[str, ...]]:
    """Read conversations as in ShareGPT: a list of {"conversations": [{"from": "human" | "gpt", "value": ...}]}."""
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: a list of conversations is expected")
    return _listed(listed, path)


def _listed(listed: Sequence[Any], path: Path) -> tuple[list[TraceRequest], tuple[str, ...]]:
    requests = [request for index, entry in enumerate(listed) for request in _turns(entry, path, index)]
    counted = f"token counts of {path.name} ({_CHARACTERS_PER_TOKEN} characters each, where it has none)"
    return requests, (counted,)


def _turns(entry: Any, path: Path, index: int) -> Iterator[TraceRequest]:
    """Yield a request for each user message that has an answer; all earlier text is cached."""
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
            yield TraceRequest(held + asked, tokens, held, None, turn)
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


def _check(requests: list[TraceRequest], path: Path) -> None:
    if not requests:
        raise ConfigError(f"{path}: no requests")
    stamps = [request.timestamp for request in requests if request.timestamp is not None]
    for earlier, later in itertools.pairwise(stamps):
        if later < earlier:
            raise ConfigError(f"{path}: timestamps are not ascending: {later:g} follows {earlier:g}")
    if len({(request.prompt_tokens, request.cached_tokens) for request in requests}) == 1:
        raise ConfigError(
            f"{path}: every request has {requests[0].prompt_tokens:.0f} tokens; no threshold splits one length"
        )


@dataclass(frozen=True)
class LogNormalSpec:
    """Truncated log-normal; the defaults are the paper's case study."""

    mu: float = setting(NUMBER, default=9.90, doc="Mean of ln(prompt tokens).")
    sigma: float = setting(NUMBER, default=1.00, minimum=1e-3, doc="Standard deviation of ln(prompt tokens).")
    min: int = setting("tokens", default=128, minimum=1, doc="Shortest prompt.")
    max: int = setting("tokens", default=131_072, doc="Longest prompt.")
    output: int = setting("tokens", default=1024, minimum=1, doc="Mean number of output tokens.")
    output_cv: float = setting(NUMBER, default=0.0, doc="Standard deviation of the output tokens over their mean.")
    hits: str = setting(
        "text", default="", doc='Prefix hits, "40%:50%/20%:90%": 40 % find half of their prompt cached.'
    )

    def __post_init__(self) -> None:
        if self.min >= self.max:
            raise ValueError("min must be below max")


def parse_spec(spec: str) -> Workload:
    """Return the workload of a one-line description.

    Raises:
        ConfigError: an unknown kind, key or unit.
    """
    kind, _, rest = spec.partition(":")
    if kind.strip() != "lognormal":
        raise ConfigError(f"trace {spec!r}: neither a file nor lognormal[:key=value,...]")
    pairs = [item.partition("=") for item in rest.split(",") if item.strip()]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    parsed = config.load_mapping(LogNormalSpec, values, where=f"trace {spec!r}")
    lengths = _prompts(parsed, spec)
    return Workload(spec, lengths, with_context(OutputTokens(parsed.output, parsed.output_cv**2), lengths))


def _prompts(parsed: LogNormalSpec, spec: str) -> Lengths:
    """Return the uncached tokens. A hit of h leaves (1 − h) of the prompt, with h / (1 − h) times as much cached."""
    hits = _hits(parsed.hits, spec)
    missed = 1.0 - sum(share for share, _ in hits)
    shares = [(missed, 0.0), *hits] if missed > 1e-12 else hits
    try:
        return mixture([(share, _hit(parsed, ratio)) for share, ratio in shares])
    except ValueError as error:
        raise ConfigError(f"trace {spec!r}: {error}") from error


def _hit(parsed: LogNormalSpec, ratio: float) -> Lengths:
    left = 1.0 - ratio
    low, high = parsed.min * left, parsed.max * left
    return log_normal(parsed.mu + math.log(left), parsed.sigma, low, high, cached_ratio=ratio / left)


def _hits(text: str, spec: str) -> list[tuple[float, float]]:
    hits = []
    for item in filter(None, text.split("/")):
        share, _, ratio = item.partition(":")
        try:
            hits.append((parse_ratio(share), parse_ratio(ratio)))
        except ValueError as error:
            raise ConfigError(f'trace {spec!r}: hits: {item!r}: {error}; write "40%:50%/20%:90%"') from error
    if sum(share for share, _ in hits) > 1 + 1e-12 or any(ratio >= 1 for _, ratio in hits):
        raise ConfigError(f"trace {spec!r}: hits: shares add up to 100% at most, and no hit is the whole prompt")
    return hits

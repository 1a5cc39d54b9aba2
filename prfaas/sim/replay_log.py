"""Recorded decisions with their inputs, in the form of a manager's `/decisions/<id>`: written, read and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from prfaas.errors import ConfigError
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot

_ACCEPTED = "name a file of JSON that --record wrote, or what a manager's /decisions/<id> answered"


@dataclass(frozen=True)
class Difference:
    """Decision that differs from its record, by its position in the file."""

    position: int
    recorded: dict[str, Any]
    made: dict[str, Any]


class Recorder:
    """`Watch` that writes each decision as one line of JSON."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        record = {"decision": asdict(decision), "snapshot": snapshot.to_dict(), "facts": facts.to_dict()}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file: one JSON object, a list of objects, or one object per line.

    Raises:
        ConfigError: the file cannot be read, or holds no records.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = _parsed(text)
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror}; {_ACCEPTED}") from error
    except ValueError as error:
        raise ConfigError(f"--replay {path}: {error}; {_ACCEPTED}") from error
    if not found or not all(
        isinstance(item, dict) and {"decision", "snapshot", "facts"} <= item.keys() for item in found
    ):
        raise ConfigError(f"--replay {path}: it holds no such records; {_ACCEPTED}")
    return found


def _parsed(text: str) -> list[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def replay(records: Iterable[dict[str, Any]]) -> Iterator[Difference]:
    """Yield the decisions that `scheduler.route` decides differently today.

    Raises:
        ConfigError: a record lacks a field, or has an unknown field.
    """
    for position, record in enumerate(records, start=1):
        try:
            snapshot, facts = Snapshot.from_dict(record["snapshot"]), RequestFacts.from_dict(record["facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"record {position}: {error!r}") from error
        made = asdict(route(snapshot, facts))
        if made != record["decision"]:
            yield Difference(position, record["decision"], made)

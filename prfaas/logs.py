"""Structured logs: an event name with fields, as JSON lines, or as text on a terminal.

logs.setup("agent")                                   # once, in the command
log = logs.get("agent.send")                       # per module
log.info("transfer.complete", transfer_id=..., bytes=...)
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

_CLIENT_FAULT_MODULES = ("aiohttp.http_exceptions", "aiohttp.web_protocol")


class _Event:
    """Message of a log record. `str` gives text for any handler of the host process."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={_plain(value)}" for key, value in self.fields.items())])


def _plain(value: Any) -> Any:
    """Return `value` in a form that JSON can hold. Bytes become hex."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


class Log:
    """Named logger for events with fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Write an error line with the traceback of the current exception."""
        self._write(logging.ERROR, event, fields, trace=True)

    def _write(self, level: int, event: str, fields: dict[str, Any], *, trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, _Event(event, fields), exc_info=trace)


def get(name: str) -> Log:
    """Return the log of one part of the package, such as "agent" or "agent.send"."""
    return Log(f"prfaas.{name}")


def _split(record: logging.LogRecord) -> tuple[str, Mapping[str, Any]]:
    """Return event name and fields. A line of another library is an event without fields."""
    if isinstance(record.msg, _Event):
        return record.msg.name, record.msg.fields
    return record.getMessage(), {}


class JsonLines(logging.Formatter):
    """Formatter for one JSON object per line: time (UTC), level, component, logger, event, fields."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _split(record)
        head = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "event": event,
        }
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info and record.exc_info[0] else {}
        return json.dumps(_plain({**fields, **head, **trace}), ensure_ascii=False)


class TerminalLines(logging.Formatter):
    """Formatter for one short line: time, level, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _split(record)
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        words = " ".join(f"{key}={_plain(value)}" for key, value in fields.items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        return f"{moment} {record.levelname:7} {event:28} {words}".rstrip() + trace


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for aiohttp's tracebacks about malformed requests and clients that disconnected."""
    error = record.exc_info[1] if record.exc_info and record.name == "aiohttp.server" else None
    return not (isinstance(error, ConnectionResetError) or type(error).__module__ in _CLIENT_FAULT_MODULES)


def setup(component: str, *, stream: TextIO | None = None, logger: str = "") -> None:
    """Send all logs of this process to `stream` (default stderr): text on a terminal, else JSON lines.

    Inside a host process, `logger="prfaas"` leaves the logs of other libraries unchanged.
    """
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(TerminalLines() if target.isatty() else JsonLines(component))
    handler.addFilter(_is_relevant)
    root = logging.getLogger(logger)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False

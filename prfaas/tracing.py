"""Spans of a request across processes, with W3C trace context. No spans are made before `use` sets a tracer."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

HEADER = "traceparent"  # Used in HTTP requests and gRPC calls.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

# Documentation of the setting `traces_endpoint` of each component.
SETTING_DOC = "OTLP collector (HTTP) for spans, such as http://10.0.0.9:4318; empty: none. Extra `site`."

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool | None


class Span:
    """One unit of work. This class does nothing; a tracer returns a subclass."""

    @property
    def traceparent(self) -> str:
        """Return the text that the next process continues; empty without a tracer."""
        return ""

    def note(self, **attributes: Attribute) -> None:
        """Add attributes. None is left out."""

    def event(self, name: str) -> None:
        """Record an event at this moment."""

    def end(self, failure: str = "") -> None:
        """End the span, with the failure if there was one."""


class Tracer(Protocol):
    """Receiver of spans. `otlp.py` has the implementation."""

    def begin(
        self, name: str, *, kind: Kind, parent: str, is_remote: bool, attributes: Mapping[str, Attribute]
    ) -> Span:
        """Start a span. `parent` is a traceparent or empty; `is_remote` says that another process made it."""


NO_SPAN = Span()
_tracer: Tracer | None = None
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def use(tracer: Tracer | None) -> None:
    """Send every span of this process to `tracer`. None turns spans off."""
    global _tracer
    _tracer = tracer


def is_traceparent(text: object) -> bool:
    """Return whether this is a W3C traceparent of version 00 with ids other than zero."""
    return isinstance(text, str) and _TRACEPARENT.fullmatch(text) is not None


def root(name: str, *, parent: str = "", **attributes: Attribute) -> Span:
    """Start the first span of a request in this deployment, below the client's span if there is one."""
    return _begin(name, "server", parent if is_traceparent(parent) else "", is_remote=True, attributes=attributes)


def continued(name: str, parent: str, *, kind: Kind = "server", **attributes: Attribute) -> Span:
    """Start a span below the parent of another process. Without a parent, return a span that does nothing."""
    if not is_traceparent(parent):
        return NO_SPAN
    return _begin(name, kind, parent, is_remote=True, attributes=attributes)


def child(name: str, *, kind: Kind = "internal", **attributes: Attribute) -> Span:
    """Start a span below the current one. Without a current span, return one that does nothing."""
    parent = current().traceparent
    return _begin(name, kind, parent, is_remote=False, attributes=attributes) if parent else NO_SPAN


def current() -> Span:
    """Return the current span of this task."""
    return _current.get()


def headers() -> dict[str, str]:
    """Return the headers that carry the current span to another process."""
    traceparent = current().traceparent
    return {HEADER: traceparent} if traceparent else {}


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """Make `span` the current one and end it with the block. An exception becomes the failure."""
    if span is NO_SPAN and _current.get() is NO_SPAN:
        yield span
        return
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        span.end(f"{type(error).__name__}: {error}")
        raise
    else:
        span.end()
    finally:
        _current.reset(token)


def _begin(name: str, kind: Kind, parent: str, *, is_remote: bool, attributes: Mapping[str, Attribute]) -> Span:
    if _tracer is None:
        return NO_SPAN
    return _tracer.begin(name, kind=kind, parent=parent, is_remote=is_remote, attributes=attributes)

"""Spans of a request across processes, as W3 trace context carries them; none are made until `use` says who takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

HEADER = "traceparent"  # of an HTTP request and of a gRPC call
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

# What the setting `traces_endpoint` of each component says.
SETTING_DOC = (
    "Where the spans of requests are sent (OTLP over HTTP, such as http://10.0.0.9:4318); when empty none are made. Needs the "
    "extra `tracing`."
)

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool | None


class Span(Protocol):
    """One piece of work. `traceparent` is what the next process is told; empty where nobody takes spans."""

    @property
    def traceparent(self) -> str: ...

    def note(self, **attributes: Attribute) -> None:
        """Add what is known by now; None is left out."""

    def event(self, name: str) -> None:
        """Mark this moment."""

    def end(self, failure: str = "") -> None:
        """The work is done, or has failed for a reason."""


class Tracer(Protocol):
    """Who takes spans (`otlp.py`)."""

    def begin(
        self, name: str, *, kind: Kind, parent: str, is_remote: bool, attributes: Mapping[str, Attribute]
    ) -> Span:
        """Return a span that has begun; `parent` is a traceparent, of another process where `is_remote`, or empty."""


class NoSpan:
    """What is made while nobody takes spans."""

    traceparent = ""

    def note(self, **attributes: Attribute) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def end(self, failure: str = "") -> None:
        pass


NO_SPAN = NoSpan()
_tracer: Tracer | None = None
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def use(tracer: Tracer | None) -> None:
    """Give every span of this process to `tracer`; None: make none."""
    global _tracer
    _tracer = tracer


def is_traceparent(text: object) -> bool:
    """Return whether this is a W3 traceparent of version 00, with ids that are not zero."""
    return isinstance(text, str) and _TRACEPARENT.fullmatch(text) is not None


def root(name: str, *, parent: str = "", **attributes: Attribute) -> Span:
    """Return the first span of this deployment for a request, below the client's own one where it named one."""
    return _begin(name, "server", parent if is_traceparent(parent) else "", is_remote=True, attributes=attributes)


def continued(name: str, parent: str, *, kind: Kind = "server", **attributes: Attribute) -> Span:
    """Return a span below the one that another process named; none where it named none."""
    if not is_traceparent(parent):
        return NO_SPAN
    return _begin(name, kind, parent, is_remote=True, attributes=attributes)


def child(name: str, *, kind: Kind = "internal", **attributes: Attribute) -> Span:
    """Return a span below the current one; none where there is none."""
    parent = current().traceparent
    return _begin(name, kind, parent, is_remote=False, attributes=attributes) if parent else NO_SPAN


def current() -> Span:
    """Return the span of the `within` that runs here, its tasks included."""
    return _current.get()


def headers() -> dict[str, str]:
    """What a call to another process says of the current span."""
    traceparent = current().traceparent
    return {HEADER: traceparent} if traceparent else {}


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """Make `span` the current one; it ends with the block, and an exception is its failure."""
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

"""Spans: what continues a trace, what is a span's parent, and that nothing is made while nobody takes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from prfaas import tracing
from prfaas.cli import startup

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Taken(tracing.Span):
    """A span and what became of it."""

    name: str
    parent: str
    is_remote: bool
    traceparent: str = ""
    attributes: dict[str, tracing.Attribute] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, **attributes: tracing.Attribute) -> None:
        self.attributes |= attributes

    def event(self, name: str) -> None:
        pass

    def end(self, failure: str = "") -> None:
        self.failures.append(failure)


class Taking:
    """A tracer that numbers its spans."""

    def __init__(self) -> None:
        self.spans: list[Taken] = []

    def begin(
        self,
        name: str,
        *,
        kind: tracing.Kind,
        parent: str,
        is_remote: bool,
        attributes: Mapping[str, tracing.Attribute],
    ) -> Taken:
        trace = parent.split("-")[1] if parent else "f" * 32
        span = Taken(name, parent, is_remote, f"00-{trace}-{len(self.spans) + 1:016x}-01", dict(attributes))
        self.spans.append(span)
        return span


@pytest.fixture
def taking() -> Iterator[Taking]:
    tracer = Taking()
    tracing.use(tracer)
    yield tracer
    tracing.use(None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        5,
        PARENT[:-1],
        PARENT.upper(),
        PARENT + "\n",
        PARENT.replace("00-", "01-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)
def test_what_is_no_traceparent_is_taken_for_none(text: object) -> None:
    assert not tracing.is_traceparent(text)


def test_a_trace_is_continued_where_one_is_named_and_begun_at_the_door_alone(taking: Taking) -> None:
    assert tracing.continued("call", "") is tracing.NO_SPAN
    assert tracing.child("step") is tracing.NO_SPAN
    assert tracing.root("request", parent="nonsense").traceparent.startswith(f"00-{'f' * 32}-")
    assert tracing.continued("call", PARENT).traceparent.split("-")[1] == PARENT.split("-")[1]
    assert [(span.parent, span.is_remote) for span in taking.spans] == [("", True), (PARENT, True)]


def test_spans_within_each_other_are_parent_and_child(taking: Taking) -> None:
    with tracing.within(tracing.root("request")) as outer:
        with tracing.within(tracing.child("step", name_of_it="a")):
            assert tracing.headers() == {"traceparent": taking.spans[1].traceparent}
        assert tracing.current() is outer
    assert tracing.headers() == {}
    assert (taking.spans[1].parent, taking.spans[1].is_remote) == (taking.spans[0].traceparent, False)
    assert [span.failures for span in taking.spans] == [[""], [""]]


def test_an_exception_is_the_failure_of_every_span_that_it_leaves(taking: Taking) -> None:
    with (
        pytest.raises(ValueError, match="broken"),
        tracing.within(tracing.root("request")),
        tracing.within(tracing.child("step")),
    ):
        raise ValueError("broken")
    assert [span.failures for span in taking.spans] == [["ValueError: broken"]] * 2


def test_nothing_is_made_or_told_while_nobody_takes_spans() -> None:
    assert tracing.root("request", parent=PARENT) is tracing.NO_SPAN
    with tracing.within(tracing.continued("call", PARENT)):
        assert tracing.headers() == {}


def test_no_endpoint_makes_no_spans() -> None:
    startup.send_spans("agent", "", instance="a")
    assert tracing.root("request") is tracing.NO_SPAN

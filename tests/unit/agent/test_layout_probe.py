"""Whether blocks of a peer's layout would be taken here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from prfaas.agent.transfer.layouts import MAX_DESCRIBED_BYTES, TOO_MANY_LAYOUTS, LayoutRegistry
from prfaas.agent.transfer.open_body import encode_layout_probe
from prfaas.cachepool.pool import Pool
from prfaas.errors import RemoteProtocolError
from prfaas.kv.layout import Layout
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.receiver.api import Accepted, OpenRequest, Rejected
from prfaas.types import AgentName
from tests.unit.cachepool.layouts import hybrid


@pytest.fixture
def layouts() -> Iterator[LayoutRegistry]:
    """An engine here has a layout of the model."""
    with contextlib.closing(Pool(1 << 20)) as pool:
        pool.arena(hybrid())
        yield LayoutRegistry(AgentName("west"), pool)


def _ask(layouts: LayoutRegistry, layout: Layout) -> Accepted | Rejected:
    return layouts.answer_probe(_request(encode_layout_probe(layout)))


def _request(body: bytes) -> OpenRequest:
    return OpenRequest(bytes(16), "east", body, ObjectSizes.of([]), 60.0)


@pytest.mark.parametrize("layout", [hybrid(), hybrid("another")], ids=["the same", "of a model that is not here"])
def test_matching_or_unknown_layout_passes_the_probe(layouts: LayoutRegistry, layout: Layout) -> None:
    answer = _ask(layouts, layout)
    assert isinstance(answer, Accepted) and not answer.held


def test_different_layout_of_a_known_model_fails_the_probe(layouts: LayoutRegistry) -> None:
    answer = _ask(layouts, replace(hybrid(), groups=hybrid().groups[:1]))
    assert isinstance(answer, Rejected) and answer.reason == "layout_mismatch"
    assert answer.message.startswith("west holds this model with another layout")


def test_unknown_layouts_are_read_up_to_a_limit(layouts: LayoutRegistry) -> None:
    while layouts._may_describe("east", MAX_DESCRIBED_BYTES // 64):
        pass
    while layouts._may_describe("east", 1):
        pass
    assert _ask(layouts, hybrid("another")) == Rejected("no_memory", TOO_MANY_LAYOUTS)
    assert isinstance(_ask(layouts, hybrid()), Accepted)


def test_malformed_probe_breaks_the_protocol(layouts: LayoutRegistry) -> None:
    with pytest.raises(RemoteProtocolError):
        layouts.answer_probe(_request(b"\x92\xa4open\x80"))

"""Each token reaches its client once and in its place, whatever the sides send twice or the rings reorder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from prfaas.colocate.front import Front
from prfaas.colocate.processes.messages import Kind, read_request
from prfaas.colocate.processes.ring import RingReader, RingWriter
from prfaas.colocate.processes.shared_memory import SIDES
from prfaas.errors import LocalProtocolError


class Ends:
    """A front, and the ends of its rings that the sides would hold."""

    def __init__(self) -> None:
        self.wake = {name: os.eventfd(0, os.EFD_NONBLOCK) for name in (*SIDES, "front")}
        self.front = Front(self.wake)
        rings = self.front.open()
        self.reads = {side: RingReader(rings[side].from_front) for side in SIDES}
        self.writes = {side: RingWriter(rings[side].to_front, self.wake["front"]) for side in SIDES}
        self.got: list[tuple[int, bool]] = []

    def submit(self, max_tokens: int = 3) -> int:
        return self.front.submit(
            (1, 2), max_tokens, stop_token=None, on_token=lambda token, finished: self.got.append((token, finished))
        )


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for fd in made.wake.values():
        os.close(fd)


def test_a_request_goes_to_both_sides_at_once(ends: Ends) -> None:
    number = ends.submit()
    for side in SIDES:
        ((kind, words),) = ends.reads[side].drain()
        assert kind == Kind.REQUEST and read_request(words).request == number


def test_prefills_token_comes_before_decodes_although_both_lay_there(ends: Ends) -> None:
    number = ends.submit()
    ends.writes["prefill"].push(Kind.TOKENS, (number, 0, 10))
    ends.writes["decode"].push(Kind.TOKENS, (number, 1, 11, number, 2, 12))
    ends.front.poll()
    assert ends.got == [(10, False), (11, False), (12, True)]
    assert ends.front.num_live == 0


def test_a_token_that_was_computed_twice_reaches_the_client_once(ends: Ends) -> None:
    number = ends.submit()
    ends.writes["prefill"].push(Kind.TOKENS, (number, 0, 10))
    ends.writes["prefill"].push(Kind.TOKENS, (number, 0, 10))
    ends.front.poll()
    assert ends.got == [(10, False)]


def test_a_new_decode_side_is_told_what_the_client_already_has(ends: Ends) -> None:
    number = ends.submit()
    ends.writes["prefill"].push(Kind.TOKENS, (number, 0, 10))
    rings, _ = ends.front.replace("decode")  # Reads pending records first.
    ends.front.announce("decode")
    ((_, words),) = RingReader(rings.from_front).drain()
    again = read_request(words)
    assert (again.tokens, again.num_generated, again.max_tokens) == ((1, 2, 10), 1, 3)
    assert [kind for kind, _ in ends.reads["prefill"].drain()] == [Kind.REQUEST, Kind.PEER_RESTARTED, Kind.REQUEST]


def test_a_gap_in_an_answer_is_our_bug_and_never_reaches_the_client(ends: Ends) -> None:
    number = ends.submit()
    ends.writes["decode"].push(Kind.TOKENS, (number, 1, 11))
    with pytest.raises(LocalProtocolError, match="token 1 came after 0 tokens"):
        ends.front.poll()
    assert ends.got == []


def test_a_request_that_cannot_be_sent_is_not_sent_again_later(ends: Ends) -> None:
    with pytest.raises(OverflowError):
        ends.front.submit((1, 1 << 40), 3, stop_token=None, on_token=lambda *_: None)
    assert ends.front.num_live == 0

"""What the connections of a link take from it, and what becomes of what they report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import LinkLoad
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.sender.api import SendAccepted, SendProgress
from prfaas.transport.sender.connection_worker import ConnectionWorker
from tests.unit.transport.lines import ID, Site, two_lines

SECOND = b"s" * 16


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def two(site: Site) -> Iterator[tuple[ConnectionWorker, ConnectionWorker]]:
    with two_lines(site.work, generation=site.lines.generation) as made:
        for line in made:
            site.lines.add(line)
        yield made


def test_a_line_says_open_and_then_reads_what_the_peer_lacks(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    line, _ = two
    frame = site.work.take(line)
    assert isinstance(frame, bytes) and Header.decode(frame[:HEADER_BYTES]).type is FrameType.OPEN
    assert (line.says, line.reads) == (ID, None)
    assert site.work.take(line) is None, "nothing leaves before the peer has said what it holds"
    site.hear_have(line)
    assert [type(event) for event in site.events] == [SendAccepted]
    taken = site.take(line)
    assert (line.says, line.reads) == (None, ID)
    site.work.sent(line, taken.chunk, [])
    assert line.reads is None
    site.work.acknowledged(line, [taken.chunk], [])
    assert isinstance(site.events[-1], SendProgress) and site.events[-1].acked_bytes == taken.chunk.slab.num_bytes


def test_a_chunk_that_came_changed_leaves_again(site: Site, two: tuple[ConnectionWorker, ConnectionWorker]) -> None:
    line, other = two
    site.work.take(line)
    site.hear_have(line)
    taken = site.take(line)
    site.work.sent(line, taken.chunk, [])
    frame = site.work.take(line)
    assert isinstance(frame, bytes) and Header.decode(frame[:HEADER_BYTES]).type is FrameType.END
    assert site.work.take(line) is None
    site.work.acknowledged(line, [], [taken.chunk])
    assert site.take(other).chunk == taken.chunk


def test_what_lines_to_an_earlier_process_report_does_not_count(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    line, _ = two
    site.work.take(line)
    site.hear_have(line)
    taken, told = site.take(line), len(site.events)
    site.lines.lead_to(SECOND)
    site.outbox.connection_lost(is_last=True)
    site.hear_have(line)
    site.work.acknowledged(line, [taken.chunk], [])
    assert len(site.events) == told
    assert site.outbox.sizes_of(ID) is not None, "its HAVE is still awaited"


def test_what_an_earlier_process_wants_to_be_sent_is_not_heeded(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    line, _ = two
    site.work.may_send(line, 1000)
    site.lines.lead_to(SECOND)
    site.work.may_send(line, 2000)
    assert site.rates == [1000]


def test_an_answer_that_nobody_waits_for_is_not_taken_apart(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    line, _ = two
    site.hear_have(line, transfer_id=SECOND, damage=b"no HAVE")
    with pytest.raises(RemoteProtocolError):
        site.hear_have(line, damage=b"no HAVE")


def test_a_line_that_is_dead_or_not_wanted_has_nothing_to_wait_for(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    line, other = two
    assert site.work.has_work(line, 0.0)
    line.abort()
    assert site.work.take(line) is None
    with pytest.raises(ConnectionAbortedError):
        site.work.has_work(line, 60.0)
    assert site.work.take(other) is not None, "which the dead one has left"
    assert not site.work.has_work(other, 0.0)
    site.is_wanted = False
    with pytest.raises(ConnectionAbortedError):
        site.work.has_work(other, 60.0)


@pytest.mark.parametrize("is_probing", [False, True])
def test_of_a_probe_nothing_is_packed_to_see_what_that_would_bring(
    site: Site, two: tuple[ConnectionWorker, ConnectionWorker], *, is_probing: bool
) -> None:
    line, _ = two
    site.work.take(line)
    site.hear_have(line)
    for at in (0.0, 2.0):  # a link that has been full for a while
        site.gauge.packing.observe(LinkLoad(at, 1e6, 1, is_full=True, acknowledged_bytes=int(at * 1e6)))
    if is_probing:
        site.gauge.begin_probe()
    taken = site.take(line)
    assert taken.way is None and taken.is_trial is not is_probing

"""Which connections of a link count as stalled, and which merely wait, as everybody does."""

from __future__ import annotations

from prfaas.transport.congestion.stall_detector import (
    GRACE_SECONDS,
    LASTING_SECONDS,
    MOVING_SECONDS,
    STALL_ANSWERS,
    STALL_SECONDS,
    ConnectionLiveness,
    StallDetector,
)

TICK = 0.05
LATE = STALL_SECONDS + GRACE_SECONDS + 2 * TICK


class Link:
    """Connections by name, of which "stuck" has sent a chunk at second 100 and hears nothing of it."""

    def __init__(self, *others: str) -> None:
        self.now = 100.0
        self.pulses = {name: ConnectionLiveness() for name in ("stuck", *others)}
        self.send("stuck")
        self.wants_pings = False
        self._watch = StallDetector[str]()

    def send(self, name: str) -> None:
        its = self.pulses[name]
        its.oldest_at = self.now if its.oldest_at is None else its.oldest_at

    def acknowledge(self, name: str, *, took: float = 0.1) -> None:
        self.pulses[name].acknowledged(self.now - took, self.now - took, oldest_at=None, now=self.now)

    def pong(self, name: str) -> None:
        self.pulses[name].pinged(self.now)
        self.pulses[name].ponged()

    def stalled_at(self, now: float, *, each: tuple[str, ...] = (), moving: str = "", took: float = 0.1) -> list[str]:
        """Those that have stalled by then; a chunk of `each` is acknowledged at every tick, and `moving` moves at each."""
        while self.now < now:
            self.now += TICK
            for name in each:
                self.acknowledge(name, took=took)
            if moving:
                segments = int(self.now / TICK)
                self.pulses[moving].saw(unsent_bytes=1, delivered_segments=segments, now=self.now)
            stalled, self.wants_pings = self._watch.look(self.pulses, now=self.now)
            if stalled:
                return stalled
        return []


def test_a_connection_is_stalled_when_what_left_long_after_it_moved_is_answered_and_it_is_not() -> None:
    assert Link("other").stalled_at(100 + LATE + TICK, each=("other",)) == ["stuck"]


def test_it_is_not_before_that_is_long() -> None:
    assert Link("other").stalled_at(100 + LATE - 4 * TICK, each=("other",)) == []


def test_while_nothing_is_answered_none_is_stalled_and_pings_are_wanted() -> None:
    link = Link("other")
    link.acknowledge("other")
    assert link.stalled_at(100 + STALL_SECONDS - TICK) == [] and not link.wants_pings
    assert link.stalled_at(1000) == [] and link.wants_pings


def test_the_answer_to_a_ping_tells_of_a_link_that_has_nothing_else_to_send() -> None:
    link = Link("idle")
    link.stalled_at(100 + STALL_SECONDS + TICK)
    link.pong("idle")
    assert link.stalled_at(100 + LATE + 2 * TICK) == ["stuck"]
    assert not link.wants_pings


def test_one_that_still_moves_is_slow_and_not_stalled() -> None:
    assert Link("other").stalled_at(1000, each=("other",), moving="stuck") == []


def test_bytes_that_the_kernel_has_sent_all_of_are_no_movement() -> None:
    pulse = ConnectionLiveness(oldest_at=100.0)
    pulse.saw(unsent_bytes=0, delivered_segments=5, now=101.0)
    pulse.saw(unsent_bytes=9, delivered_segments=5, now=102.0)
    assert pulse.waits_since == 100.0
    pulse.saw(unsent_bytes=9, delivered_segments=6, now=103.0)
    assert pulse.waits_since == 103.0


def test_a_connection_that_lasts_and_still_moves_is_slow() -> None:
    pulse = ConnectionLiveness(began_at=100.0)
    for segments, now in ((1, 101.0), (2, 100.0 + LASTING_SECONDS)):
        assert not pulse.is_slow(now)
        pulse.saw(unsent_bytes=1, delivered_segments=segments, now=now)
    assert pulse.is_slow(now) and pulse.is_slow(now + MOVING_SECONDS)
    assert not pulse.is_slow(now + MOVING_SECONDS + TICK)


def test_behind_a_queue_of_seconds_everybody_has_longer() -> None:
    link, queue_seconds = Link("other"), 2.0
    patience = STALL_ANSWERS * queue_seconds
    link.pulses["stuck"].chunk_seconds = queue_seconds
    assert link.stalled_at(100 + patience + queue_seconds, each=("other",), took=queue_seconds) == []
    late = 100 + patience + queue_seconds + GRACE_SECONDS + 2 * TICK
    assert link.stalled_at(late, each=("other",), took=queue_seconds) == ["stuck"]


def test_a_peer_that_has_paused_may_come_to_its_connections_one_after_the_other() -> None:
    link = Link("other")
    assert link.stalled_at(105) == []
    assert link.stalled_at(105 + GRACE_SECONDS - TICK, each=("other",)) == []
    link.acknowledge("stuck", took=5.0)
    assert link.stalled_at(200, each=("other",)) == []


def test_each_one_that_is_ended_in_vain_doubles_the_patience() -> None:
    """Until a chunk is acknowledged: on a link that is slower than it seems some would be ended for ever."""
    link = Link("idle")
    for factor in (1, 2, 4):
        patience, since = factor * STALL_SECONDS, link.now
        link.pulses["stuck"] = ConnectionLiveness(oldest_at=since)
        assert link.stalled_at(since + patience + TICK) == []
        link.pong("idle")
        assert link.stalled_at(since + patience + LATE) == ["stuck"]
        assert link.now >= since + patience + GRACE_SECONDS
    link.acknowledge("idle")
    link.pulses["stuck"] = ConnectionLiveness(oldest_at=link.now)
    assert link.stalled_at(link.now + LATE + 2 * TICK, each=("idle",)) == ["stuck"]


class _TakenBack(ConnectionLiveness):
    """Whose PING cannot leave just after it was looked at."""

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "pinged_at":
            self.pinged_at = None
        return value


def test_a_ping_may_be_taken_back_while_a_pong_is_heard() -> None:
    pulse = _TakenBack()
    pulse.pinged(10.0)
    pulse.ponged()
    assert pulse.answered == 10.0


def test_pongs_answer_the_pings_in_their_order() -> None:
    pulse = ConnectionLiveness()
    pulse.pinged(10.0)
    pulse.pinged(15.0)
    pulse.ponged()
    assert pulse.answered == 10.0
    pulse.ponged()
    assert pulse.answered == 10.0

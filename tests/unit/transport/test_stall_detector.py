"""Unreachable peers and stalled connections."""

import pytest

from prfaas.transport.congestion.stall_detector import (
    FRUITLESS_SECONDS,
    GRACE_SECONDS,
    LASTING_SECONDS,
    MOVING_SECONDS,
    STALL_ANSWERS,
    STALL_SECONDS,
    STEADY_SECONDS,
    ConnectionLiveness,
    PeerLiveness,
    StallDetector,
)

# Peers


def _unreachable(peer: PeerLiveness, now: float, *, is_connected: bool = False, awaits_peer: bool = True) -> float:
    return peer.seconds_unreachable(now=now, is_connected=is_connected, awaits_peer=awaits_peer)


def test_peer_is_unreachable_since_its_last_connection() -> None:
    peer = PeerLiveness(now=0.0)
    assert _unreachable(peer, 5.0) == 5.0, "it never had a connection"
    peer.connection_lost(now=5.0, lifetime_seconds=STEADY_SECONDS)
    assert _unreachable(peer, 6.0) == 1.0


def test_short_connection_counts_only_if_it_made_progress() -> None:
    peer = PeerLiveness(now=0.0)
    peer.connection_lost(now=5.0, lifetime_seconds=STEADY_SECONDS / 2)
    assert _unreachable(peer, 6.0) == 6.0
    peer.progressed(now=6.5)
    peer.connection_lost(now=7.0, lifetime_seconds=STEADY_SECONDS / 2)
    assert _unreachable(peer, 7.0) == 0.5


@pytest.mark.parametrize("awaits_peer", [False, True])
def test_connected_peer_is_unreachable_if_awaited_progress_does_not_come(*, awaits_peer: bool) -> None:
    peer = PeerLiveness(now=0.0)
    for second in range(100):
        seconds = _unreachable(peer, float(second), is_connected=True, awaits_peer=awaits_peer)
        assert seconds == (second if awaits_peer else 0) - FRUITLESS_SECONDS


def test_time_in_which_nothing_is_awaited_does_not_count() -> None:
    peer = PeerLiveness(now=0.0)
    peer.connection_lost(now=1.0, lifetime_seconds=STEADY_SECONDS)
    for second in range(1, 31):
        _unreachable(peer, float(second), awaits_peer=False)
    assert _unreachable(peer, 30.5) == 0.5
    assert _unreachable(peer, 31.0, is_connected=True) == 1.0 - FRUITLESS_SECONDS


def test_peer_is_silent_since_its_latest_sign_of_life_or_the_first_transfer() -> None:
    peer = PeerLiveness(now=0.0)
    assert peer.seconds_silent(now=50.0, heard_at=1.0, has_transfers=False) == 0.0
    assert peer.seconds_silent(now=51.0, heard_at=1.0, has_transfers=True) == 1.0
    assert peer.seconds_silent(now=53.0, heard_at=52.5, has_transfers=True) == 0.5


# Connections

TICK = 0.05
LATE = STALL_SECONDS + GRACE_SECONDS + 2 * TICK


class _Link:
    """Named connections of a link. "stuck" has sent a chunk at second 100 and receives no answer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connections = {name: ConnectionLiveness() for name in ("stuck", "busy")}
        self.connections["stuck"].oldest_at = self.now
        self.wants_pings = False
        self._detector = StallDetector[str]()

    def acknowledge(self, name: str, *, chunk_seconds: float = 0.1) -> None:
        sent_at = self.now - chunk_seconds
        self.connections[name].acknowledged(sent_at, sent_at, oldest_at=None, now=self.now)

    def pong(self, name: str) -> None:
        self.connections[name].pinged(self.now)
        self.connections[name].ponged()

    def stalled_until(
        self, end: float, *, is_busy: bool = False, is_moving: bool = False, chunk_seconds: float = 0.1
    ) -> list[str]:
        """Return the first stalled connections until `end`.

        "busy" receives acknowledgements if `is_busy`; the bytes of "stuck" move if `is_moving`.
        """
        while self.now < end:
            self.now += TICK
            if is_busy:
                self.acknowledge("busy", chunk_seconds=chunk_seconds)
            if is_moving:
                segments = int(self.now / TICK)
                self.connections["stuck"].observe_kernel(unsent_bytes=1, delivered_segments=segments, now=self.now)
            stalled, self.wants_pings = self._detector.check(self.connections, now=self.now)
            if stalled:
                return stalled
        return []


def test_connection_is_stalled_when_later_chunks_on_others_are_answered() -> None:
    assert _Link().stalled_until(100 + LATE - 4 * TICK, is_busy=True) == []
    assert _Link().stalled_until(100 + LATE + TICK, is_busy=True) == ["stuck"]


def test_pings_are_wanted_while_nothing_is_answered() -> None:
    link = _Link()
    link.acknowledge("busy")
    assert link.stalled_until(100 + STALL_SECONDS - TICK) == [] and not link.wants_pings
    assert link.stalled_until(1000) == [] and link.wants_pings


def test_answer_to_a_ping_reveals_a_stall_on_an_idle_link() -> None:
    link = _Link()
    link.stalled_until(100 + STALL_SECONDS + TICK)
    link.pong("busy")
    assert link.stalled_until(100 + LATE + 2 * TICK) == ["stuck"]
    assert not link.wants_pings


def test_connection_whose_bytes_move_is_slow_and_not_stalled() -> None:
    assert _Link().stalled_until(1000, is_busy=True, is_moving=True) == []


def test_patience_follows_the_queue_of_the_link() -> None:
    link, queue_seconds = _Link(), 2.0
    patience = STALL_ANSWERS * queue_seconds
    link.connections["stuck"].chunk_seconds = queue_seconds
    assert link.stalled_until(100 + patience + queue_seconds, is_busy=True, chunk_seconds=queue_seconds) == []
    late = 100 + patience + queue_seconds + GRACE_SECONDS + 2 * TICK
    assert link.stalled_until(late, is_busy=True, chunk_seconds=queue_seconds) == ["stuck"]


def test_peer_that_has_paused_may_serve_its_connections_in_turn() -> None:
    link = _Link()
    assert link.stalled_until(105) == []
    assert link.stalled_until(105 + GRACE_SECONDS - TICK, is_busy=True) == []
    link.acknowledge("stuck", chunk_seconds=5.0)
    assert link.stalled_until(200, is_busy=True) == []


def test_patience_doubles_with_each_connection_ended_in_vain_until_a_chunk_is_acknowledged() -> None:
    link = _Link()
    for factor in (1, 2, 4):
        patience, since = factor * STALL_SECONDS, link.now
        link.connections["stuck"] = ConnectionLiveness(oldest_at=since)
        assert link.stalled_until(since + patience + TICK) == []
        link.pong("busy")
        assert link.stalled_until(since + patience + LATE) == ["stuck"]
        assert link.now >= since + patience + GRACE_SECONDS
    link.acknowledge("busy")
    link.connections["stuck"] = ConnectionLiveness(oldest_at=link.now)
    assert link.stalled_until(link.now + LATE + 2 * TICK, is_busy=True) == ["stuck"]


def test_only_deliveries_of_bytes_that_waited_here_are_movement() -> None:
    liveness = ConnectionLiveness(oldest_at=100.0)
    liveness.observe_kernel(unsent_bytes=0, delivered_segments=5, now=101.0)
    liveness.observe_kernel(unsent_bytes=9, delivered_segments=5, now=102.0)
    assert liveness.waits_since == 100.0
    liveness.observe_kernel(unsent_bytes=9, delivered_segments=6, now=103.0)
    assert liveness.waits_since == 103.0


def test_old_connection_that_still_moves_is_slow() -> None:
    liveness = ConnectionLiveness(began_at=100.0)
    for segments, now in ((1, 101.0), (2, 100.0 + LASTING_SECONDS)):
        assert not liveness.is_slow(now)
        liveness.observe_kernel(unsent_bytes=1, delivered_segments=segments, now=now)
    assert liveness.is_slow(now) and liveness.is_slow(now + MOVING_SECONDS)
    assert not liveness.is_slow(now + MOVING_SECONDS + TICK)


class _UnsentPing(ConnectionLiveness):
    """Connection whose PING is taken back as soon as it was read."""

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "pinged_at":
            self.pinged_at = None
        return value


def test_ping_may_be_taken_back_while_a_pong_is_handled() -> None:
    liveness = _UnsentPing()
    liveness.pinged(10.0)
    liveness.ponged()
    assert liveness.answered == 10.0


def test_pong_answers_the_oldest_ping() -> None:
    liveness = ConnectionLiveness()
    liveness.pinged(10.0)
    liveness.pinged(15.0)
    liveness.ponged()
    liveness.ponged()
    assert liveness.answered == 10.0

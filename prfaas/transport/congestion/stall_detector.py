"""Detects peers and connections that have stopped making progress. Pure: callers pass monotonic seconds."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

STEADY_SECONDS = 1.0  # A connection that ends sooner counts as a failed attempt.
FRUITLESS_SECONDS = 15.0  # By then a connection whose frames do not arrive has ended.
STALL_SECONDS, STALL_ANSWERS = 2.0, 4
GRACE_SECONDS = 1.0  # A peer that has paused serves each of its connections within this time.
MOVING_SECONDS = 5.0  # A peer may be silent for this long after it has received a long frame.
LASTING_SECONDS = 10.0  # A connection on which bytes still move after this time is slow, not dead.
K = TypeVar("K", bound=Hashable)


class PeerLiveness:
    """Tracks how long a peer has made no progress.

    Progress means acknowledged payload. Handshakes and answers to OPEN do not count: they are so short
    that they get through on a path that carries nothing else.
    """

    def __init__(self, *, now: float) -> None:
        self._progress_at = now  # Latest progress, or latest time at which none was due.
        self._lost_at = now  # End of the latest connection that had lasted.
        self._idle_at = now  # Latest time without transfers.

    def progressed(self, *, now: float) -> None:
        """Note that bytes were acknowledged, or that a transfer is complete."""
        self._progress_at = now

    def connection_lost(self, *, now: float, lifetime_seconds: float) -> None:
        """Note the end of a connection."""
        if lifetime_seconds >= STEADY_SECONDS:
            self._lost_at = now

    def seconds_silent(self, *, now: float, heard_at: float, has_transfers: bool) -> float:
        """Return the time without a sign of life; `heard_at` is the time of the latest one.

        A peer answers a PING several times in that time while there are transfers. Call often: without transfers the
        count restarts.
        """
        if not has_transfers:
            self._idle_at = now
        return now - max(self._idle_at, heard_at)

    def seconds_unreachable(self, *, now: float, is_connected: bool, awaits_peer: bool) -> float:
        """Return the seconds since the peer became unreachable; negative while it is not overdue.

        `awaits_peer` tells whether progress depends on the peer. Call often: while it does not, the count restarts.
        """
        if not awaits_peer:
            self._progress_at = now
        if is_connected:
            return now - (self._progress_at + FRUITLESS_SECONDS)
        return now - max(self._progress_at, self._lost_at)


@dataclass(eq=False)
class ConnectionLiveness:
    """Signs of life of one connection. Any thread may read; each field has one writer or one lock."""

    began_at: float = 0.0
    oldest_at: float | None = None  # Send time of the oldest unacknowledged chunk.
    acknowledged_at: float = 0.0  # Time of the latest acknowledgement.
    chunk_seconds: float = 0.0  # Time from sending to acknowledgement of that chunk.
    answered: float = 0.0  # Send time of the latest chunk or PING that was answered.
    pinged_at: float | None = None  # Send time of the unanswered PING.
    moved_at: float = 0.0  # Latest time at which the peer's kernel took some of the bytes that wait here.
    _delivered_segments: int = 0

    @property
    def waits_since(self) -> float | None:
        """Time since which chunks have waited without any movement, or None."""
        oldest_at = self.oldest_at
        return None if oldest_at is None else max(oldest_at, self.acknowledged_at, self.moved_at)

    def is_moving(self, now: float) -> bool:
        """Return whether the peer is taking what is sent to it."""
        return now - self.moved_at <= MOVING_SECONDS

    def is_slow(self, now: float) -> bool:
        """Return whether bytes still move long after the connection began."""
        return self.is_moving(now) and self.moved_at - self.began_at >= LASTING_SECONDS

    def acknowledged(self, first_at: float, last_at: float, *, oldest_at: float | None, now: float) -> None:
        """Note the acknowledgement of the chunks that were sent between `first_at` and `last_at`."""
        self.acknowledged_at, self.chunk_seconds, self.oldest_at = now, now - first_at, oldest_at
        self.answered = max(self.answered, last_at)

    def pinged(self, now: float) -> None:
        """Note that a PING leaves."""
        if self.pinged_at is None:
            self.pinged_at = now

    def ponged(self) -> None:
        """Note the answer to the first unanswered PING."""
        # Read once: another thread takes back a PING that could not leave.
        pinged_at = self.pinged_at
        if pinged_at is not None:
            self.answered, self.pinged_at = max(self.answered, pinged_at), None

    def observe_kernel(self, *, unsent_bytes: int, delivered_segments: int, now: float) -> None:
        """Note how much the kernel still has to send, and how much the peer's kernel has received."""
        if unsent_bytes and delivered_segments != self._delivered_segments:
            self.moved_at = now
        self._delivered_segments = delivered_segments


class StallDetector(Generic[K]):
    """Finds the connections of a link that stand still while others are answered. Call every few tens of milliseconds."""

    def __init__(self) -> None:
        self._overtaken_at: dict[K, float] = {}
        self._ended_at = 0.0
        self._num_ended = 0  # Connections ended since the latest acknowledgement on any connection.

    def check(self, connections: Mapping[K, ConnectionLiveness], *, now: float) -> tuple[list[K], bool]:
        """Return the stalled connections, which the caller ends, and whether PINGs are needed to tell.

        The patience follows the time that chunks take. It doubles with each connection that is ended in vain, since the
        link may be slower than it seems.
        """
        if any(liveness.acknowledged_at > self._ended_at for liveness in connections.values()):
            self._num_ended = 0
        chunk_seconds = max((liveness.chunk_seconds for liveness in connections.values()), default=0.0)
        patience = max(STALL_SECONDS, STALL_ANSWERS * chunk_seconds) * 2**self._num_ended
        answered = max((liveness.answered for liveness in connections.values()), default=0.0)
        deadlines = {
            key: since + patience
            for key, liveness in connections.items()
            if (since := liveness.waits_since) is not None
        }
        overtaken = [key for key, deadline in deadlines.items() if deadline <= answered]
        self._overtaken_at = {key: self._overtaken_at.get(key, now) for key in overtaken}
        stalled = [key for key, at in self._overtaken_at.items() if now - at >= GRACE_SECONDS]
        if stalled:
            self._ended_at = now
            self._num_ended += 1
        return stalled, any(answered < deadline <= now for deadline in deadlines.values())

"""For how long a link's peer has been out of reach (pure): without a connection, or with some that come to nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

STEADY_SECONDS = 1.0  # a peer that ends connections sooner is dialled ever more slowly, as one that does not answer
FRUITLESS_SECONDS = 15.0  # by then a connection that has something to say has ended, if the peer hears nothing of it


class PeerLiveness:
    """`now` is monotonic seconds. Progress is what only bytes that come through bring about: a handshake is none, and an
    answer to OPEN is none, as both are short."""

    def __init__(self, *, now: float) -> None:
        self._progress_at = now  # or when there was nothing to hear
        self._lost_at = now  # the latest connection that had lasted

    def progressed(self, *, now: float) -> None:
        """Bytes were acknowledged, or a transfer is complete."""
        self._progress_at = now

    def lost(self, *, now: float, lived_seconds: float) -> None:
        """A connection has ended."""
        if lived_seconds >= STEADY_SECONDS:
            self._lost_at = now

    def gone_seconds(self, *, now: float, is_connected: bool, is_owed: bool) -> float:
        """How long it is gone, less than 0 where it need not be; `is_owed`: something waits for its word. To be asked often."""
        if not is_owed:
            self._progress_at = now
        return now - (self._progress_at + FRUITLESS_SECONDS if is_connected else max(self._progress_at, self._lost_at))


STALL_SECONDS, STALL_ANSWERS = 2.0, 4
GRACE_SECONDS = 1.0  # a peer that has paused comes to each of its connections in that time
MOVING_SECONDS = 5.0  # a peer that takes a long frame may say nothing until so long after the last of it has left
# A connection on which bytes still move after this is slow; others may be cut off again and again.
LASTING_SECONDS = 10.0


@dataclass(eq=False)
class ConnectionLiveness:
    """Signs of life of one connection. Any thread may look; each field is set by one, or under one lock."""

    began_at: float = 0.0
    oldest_at: float | None = None  # when the first chunk left that waits for its acknowledgement; None: none does
    acknowledged_at: float = 0.0  # when a chunk was
    chunk_seconds: float = 0.0  # that it took
    answered: float = 0.0  # when that left which was answered last, a chunk or a PING
    pinged_at: float | None = None  # when the PING left that waits for its answer
    moved_at: float = 0.0  # when the peer's kernel was last seen to take some of what waits here
    _delivered_segments: int = 0

    @property
    def waits_since(self) -> float | None:
        """Since when chunks wait and nothing has moved; None: no chunk waits."""
        oldest_at = self.oldest_at
        return None if oldest_at is None else max(oldest_at, self.acknowledged_at, self.moved_at)

    def is_moving(self, now: float) -> bool:
        """Whether the peer is taking what is sent to it."""
        return now - self.moved_at <= MOVING_SECONDS

    def is_slow(self, now: float) -> bool:
        """Whether it still does so long after the connection began: the peer may have had nothing to answer yet."""
        return self.is_moving(now) and self.moved_at - self.began_at >= LASTING_SECONDS

    def acknowledged(self, first_at: float, last_at: float, *, oldest_at: float | None, now: float) -> None:
        """Of the chunks that waited, those that left between these two moments have arrived."""
        self.acknowledged_at, self.chunk_seconds, self.oldest_at = now, now - first_at, oldest_at
        self.answered = max(self.answered, last_at)

    def pinged(self, now: float) -> None:
        """A PING leaves."""
        if self.pinged_at is None:
            self.pinged_at = now

    def ponged(self) -> None:
        """The first PING under way is answered."""
        pinged_at = self.pinged_at  # which a PING that could not leave takes back
        if pinged_at is not None:
            self.answered, self.pinged_at = max(self.answered, pinged_at), None

    def saw(self, *, unsent_bytes: int, delivered_segments: int, now: float) -> None:
        """What the kernel still has to send, and how much the peer's has taken."""
        if unsent_bytes and delivered_segments != self._delivered_segments:
            self.moved_at = now
        self._delivered_segments = delivered_segments


_Key = TypeVar("_Key", bound=Hashable)


class Verdict(NamedTuple, Generic[_Key]):
    """Of a link's connections: which are stalled, and whether PINGs are wanted, as nobody's answer tells of another."""

    stalled: list[_Key]
    wants_pings: bool


class StallDetector(Generic[_Key]):
    """Of one link; asked every few tens of milliseconds."""

    def __init__(self) -> None:
        self._overtaken_at: dict[_Key, float] = {}
        self._ended_at = 0.0
        self._num_ended = 0  # since a chunk was acknowledged anywhere: the link may be slower than it seems

    def look(self, pulses: Mapping[_Key, ConnectionLiveness], *, now: float) -> Verdict[_Key]:
        """Whoever asks ends the connections that are stalled."""
        if any(pulse.acknowledged_at > self._ended_at for pulse in pulses.values()):
            self._num_ended = 0
        took = max((pulse.chunk_seconds for pulse in pulses.values()), default=0.0)
        patience = max(STALL_SECONDS, STALL_ANSWERS * took) * 2**self._num_ended
        answered = max((pulse.answered for pulse in pulses.values()), default=0.0)
        ends = {key: since + patience for key, its in pulses.items() if (since := its.waits_since) is not None}
        overtaken = [key for key, end in ends.items() if end <= answered]
        self._overtaken_at = {key: self._overtaken_at.get(key, now) for key in overtaken}
        stalled = [key for key, at in self._overtaken_at.items() if now - at >= GRACE_SECONDS]
        if stalled:
            self._ended_at = now
            self._num_ended += 1
        return Verdict(stalled, wants_pings=any(answered < end <= now for end in ends.values()))

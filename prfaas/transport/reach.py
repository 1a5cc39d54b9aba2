"""For how long a link's peer has been out of reach (pure): without a connection, or with some that come to nothing."""

from __future__ import annotations

STEADY_SECONDS = 1.0  # a peer that ends connections sooner is dialled ever more slowly, as one that does not answer
FRUITLESS_SECONDS = 15.0  # by then a connection that has something to say has ended, if the peer hears nothing of it


class Reach:
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

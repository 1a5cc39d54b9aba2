"""What several links may send together before the way that they share loses bytes, learned from what it loses (pure).

BBR looks for a higher rate all the time, each connection for itself: many of them before one shallow queue overflow it
together, for good, and what is sent again is egress that carries nothing. Chance loses little: what is lost for seconds on end
is a queue that is too short for so much. Then all may send what arrived meanwhile, and no more. From there the limit rises by
a hundredth every second without such losses, and after ten of these ever faster, for the way may have become wider; it goes
when it is four times what was learned.
"""

from __future__ import annotations

from math import inf

WATCH_SECONDS = 1.0
OVERFLOW_RATIO = 0.03  # of the bytes sent: more is no chance
OVERFLOW_WINDOWS = 3  # in a row: a link that has just become slower loses for one, until BBR has seen it
PROBE_RATIO = 0.01
PATIENT_WINDOWS = 10  # of slow probing, after which the step doubles
FORGET_RATIO = 4.0


class LearnedRate:
    """Takes what all links carry and lose; says what they may send, infinity while nothing speaks for a limit."""

    def __init__(self) -> None:
        self.bytes_per_second = inf
        self._learned = 0.0
        self._num_bad, self._num_good = 0, 0
        self._window_began = self._last_at = -inf
        self._carried_bytes, self._lost_bytes = 0.0, 0.0

    def observe(self, now: float, *, carried: float, lost: float) -> None:
        """Bytes a second that arrive at present and that are sent again; only while more waits to be sent.

        Samples come from several threads: one that is older than the last is left out.
        """
        if now - self._last_at > WATCH_SECONDS:
            self._begin(now)
        if now <= self._last_at:
            return
        seconds, self._last_at = now - self._last_at, now
        self._carried_bytes += carried * seconds
        self._lost_bytes += lost * seconds
        if now - self._window_began >= WATCH_SECONDS:
            self._end(now - self._window_began)
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._window_began = self._last_at = now
        self._carried_bytes = self._lost_bytes = 0.0

    def _end(self, seconds: float) -> None:
        is_bad = self._lost_bytes > OVERFLOW_RATIO * (self._carried_bytes + self._lost_bytes)
        self._num_bad, self._num_good = (self._num_bad + 1, 0) if is_bad else (0, self._num_good + 1)
        if self._num_bad >= OVERFLOW_WINDOWS:
            self.bytes_per_second = self._learned = self._carried_bytes / seconds
        elif self._num_good and self.bytes_per_second < inf:
            self.bytes_per_second *= 1 + PROBE_RATIO * 2 ** max(0, self._num_good - PATIENT_WINDOWS)
            if self.bytes_per_second > FORGET_RATIO * self._learned:
                self.bytes_per_second = inf

"""Traffic of late: arrivals and request lengths for the planner."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

MAX_REQUESTS = 4096
MAX_OUTPUT_TOKENS = 32_768  # Clients state any limit, and answers end earlier.
MIN_WINDOW_SECONDS = 30.0
MIN_REQUESTS = 50  # Fewer do not show a distribution.


@dataclass(frozen=True)
class RequestSample:
    """Lengths of one request: uncached and cached tokens at the decode node, and the stated answer limit or 0."""

    at: float
    new_tokens: int
    cached_tokens: int
    max_output_tokens: int


def likely_output_tokens(requests: Iterable[RequestSample]) -> float | None:
    """Return the median of the stated answer limits, or None. The median ignores a few absurd limits."""
    stated = [min(request.max_output_tokens, MAX_OUTPUT_TOKENS) for request in requests if request.max_output_tokens]
    return median(stated) if stated else None


class Traffic:
    """Latest requests. Times are monotonic seconds."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[RequestSample] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0  # Since the start.
        self._reported: deque[tuple[int, int]] = deque()  # Number of reported requests by second.
        self._reported_from = math.inf  # Time of the first report.

    def note(self, seen: RequestSample) -> None:
        self.num_requests += 1
        self._seen.append(seen)

    def lately(self, now: float) -> list[RequestSample]:
        """Return the requests of the window, oldest first, or nothing while there are fewer than `MIN_REQUESTS`."""
        requests = self.within(self._window_seconds, now)
        return requests if len(requests) >= MIN_REQUESTS else []

    def within(self, seconds: float, now: float) -> list[RequestSample]:
        """Return the requests of the last `seconds`, oldest first, at most `MAX_REQUESTS`."""
        return [request for request in self._seen if request.at > now - seconds]

    def seen_ratio(self, now: float) -> float:
        """Return the share of the reported requests that were noted here; 1 while unknown."""
        seconds = min(now - self._reported_from, self._window_seconds)
        if len(self._seen) == MAX_REQUESTS:  # Older ones were dropped.
            seconds = min(seconds, now - self._seen[0].at)
        reported = self.per_second(now) * seconds
        return min(1.0, len(self.within(seconds, now)) / reported) if reported else 1.0

    def note_reports(self, num_requests: int, now: float) -> None:
        """Count requests that routers report, those that a router decided alone included."""
        self._reported_from = min(self._reported_from, now)
        if self._reported and self._reported[-1][0] == int(now):
            num_requests += self._reported.pop()[1]
        self._reported.append((int(now), num_requests))
        self._drop_old_reports(now)

    def per_second(self, now: float) -> float:
        """Return reported requests per second over the window; 0 while unknown, at first for `MIN_WINDOW_SECONDS`."""
        seconds = min(now - self._reported_from, self._window_seconds)
        self._drop_old_reports(now)
        return sum(count for _, count in self._reported) / seconds if seconds >= MIN_WINDOW_SECONDS else 0.0

    def _drop_old_reports(self, now: float) -> None:
        while self._reported and self._reported[0][0] <= now - self._window_seconds:
            self._reported.popleft()

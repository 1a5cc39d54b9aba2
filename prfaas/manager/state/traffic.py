"""The lengths of the requests that were routed lately, as the solver takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

MAX_REQUESTS = 4096
MAX_OUTPUT_TOKENS = 32_768  # what a limit counts for at most: clients state any number, and answers end before
MIN_REQUESTS = 50  # fewer say too little of a distribution


@dataclass(frozen=True)
class RequestSample:
    """One request: what of its prompt the decode node lacked and held, and its answer's limit (0: none stated)."""

    at: float
    new_tokens: int
    cached_tokens: int
    max_output_tokens: int


def likely_output_tokens(requests: Iterable[RequestSample]) -> float | None:
    """The median of the answers' limits, so that a few clients with absurd ones do not count; None where nobody stated one."""
    stated = [min(request.max_output_tokens, MAX_OUTPUT_TOKENS) for request in requests if request.max_output_tokens]
    return median(stated) if stated else None


class Traffic:
    """The latest requests. Times are seconds on a clock that only goes forward."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[RequestSample] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0  # since the start

    def note(self, seen: RequestSample) -> None:
        self.num_requests += 1
        self._seen.append(seen)

    def lately(self, now: float) -> list[RequestSample]:
        """Those of the window, oldest first; nothing while they are too few to say anything."""
        while self._seen and self._seen[0].at <= now - self._window_seconds:
            self._seen.popleft()
        return list(self._seen) if len(self._seen) >= MIN_REQUESTS else []

    def per_second(self, now: float) -> float:
        """Arrivals per second over the window, or over as much of it as the requests kept here span."""
        lately = self.lately(now)
        return len(lately) / max(now - lately[0].at, 1.0) if lately else 0.0

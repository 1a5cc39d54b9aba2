"""The requests, and the figures of a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Workload:
    """A closed loop: `concurrency` clients send `num_requests` in all, each the next one when its last was answered."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    answer_tokens: int

    def prompt(self, request: int) -> tuple[int, ...]:
        return tuple((request * 31 + 7 * i) % 256 for i in range(self.prompt_tokens))


@dataclass
class Figures:
    """Times in seconds since the run's start; `arrivals[request]` holds when each of its tokens came."""

    started: dict[int, float] = field(default_factory=dict)
    arrivals: dict[int, list[float]] = field(default_factory=dict)

    def start(self, request: int, now: float) -> None:
        self.started[request] = now
        self.arrivals[request] = []

    def summary(self, *, answer_tokens: int) -> dict[str, float]:
        """Requests per second over the whole run; TTFT and ITL over all requests and gaps."""
        ends = [times[-1] for times in self.arrivals.values()]
        gaps = [b - a for times in self.arrivals.values() for a, b in pairwise(times)]
        first = [times[0] - self.started[request] for request, times in self.arrivals.items()]
        whole = all(len(times) == answer_tokens for times in self.arrivals.values())
        assert whole, "a request came back short"
        seconds = max(ends) - min(self.started.values())
        return {
            "requests_per_second": len(ends) / seconds,
            "output_tokens_per_second": len(ends) * answer_tokens / seconds,
            "ttft_p50_seconds": statistics.median(first),
            "itl_p50_seconds": statistics.median(gaps),
            "itl_p95_seconds": _quantile(gaps, 0.95),
            "itl_p99_seconds": _quantile(gaps, 0.99),
            "itl_max_seconds": max(gaps),
        }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

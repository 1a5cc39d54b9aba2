"""A decode batch whose runs of steps are advanced in closed form: who is in it, when each ends, how long k steps take."""

from __future__ import annotations

import heapq
import math

from prfaas.model.profile import DecodeProfile
from prfaas.sim.request import Request


class DecodeBatch:
    """Requests that decode together; every step gives each of them one token.

    `steps` counts the steps so far, `context` is the sum of the requests' contexts in tokens, `reserved` what they will
    hold at most.
    """

    def __init__(self, profile: DecodeProfile | None) -> None:
        self.num = 0
        self.context = 0
        self.reserved = 0
        self.steps = 0
        self._base, self._each, self._token = (
            (0.0, 0.0, 0.0)
            if profile is None
            else (profile.base_seconds, profile.seconds_per_request, profile.seconds_per_context_token)
        )
        self._ends: list[tuple[int, int, Request, int]] = []  # heap: step, order, request, context then
        self._joined = 0

    def join(self, request: Request, context: int, num_tokens: int) -> None:
        """Add a request that holds `context` tokens and is to get `num_tokens` more."""
        self._joined += 1
        self.num += 1
        self.context += context
        self.reserved += context + num_tokens
        heapq.heappush(self._ends, (self.steps + num_tokens, self._joined, request, context + num_tokens))

    @property
    def steps_to_next_end(self) -> int:
        """After so many steps the first of them has all its tokens."""
        return self._ends[0][0] - self.steps

    @property
    def fixed_seconds(self) -> float:
        """What a step takes whoever is in it."""
        return self._base if self.num else 0.0

    def own_seconds(self, num_steps: int) -> float:
        """What the requests add to so many steps: the context grows by one token for each request and step."""
        grown = self.num * num_steps * (num_steps - 1) / 2
        return num_steps * (self._each * self.num + self._token * self.context) + self._token * grown

    def seconds(self, num_steps: int) -> float:
        """How long so many steps take while nobody joins or leaves."""
        return num_steps * self.fixed_seconds + self.own_seconds(num_steps)

    def steps_until(self, elapsed: float) -> int:
        """The least number of steps, at least 1, that take `elapsed` seconds or more."""
        rise = 0.5 * self._token * self.num
        first = self.fixed_seconds + self._each * self.num + self._token * self.context - rise
        if rise:
            estimate = (math.sqrt(first * first + 4 * rise * elapsed) - first) / (2 * rise)
        else:
            estimate = elapsed / first if first else 0.0
        steps = max(1, math.floor(estimate))
        while self.seconds(steps) < elapsed:
            steps += 1
        return steps

    def advance(self, num_steps: int) -> list[Request]:
        """Take so many steps; returns those who then have all their tokens."""
        self.steps += num_steps
        self.context += self.num * num_steps
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, request, context = heapq.heappop(self._ends)
            self.num -= 1
            self.context -= context
            self.reserved -= context
            ended.append(request)
        return ended

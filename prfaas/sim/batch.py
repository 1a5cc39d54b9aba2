"""A decode batch whose runs of steps are advanced in closed form: who is in it, when each ends, how long k steps take."""

from __future__ import annotations

import heapq
import math

from prfaas.model.profile import DecodeProfile
from prfaas.sim.gaps import StepLog
from prfaas.sim.request import Request

_ENDLESS = 1 << 62  # tokens


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
        self._ends: list[tuple[int, int]] = []  # heap: step, order; of those who left early too
        # By order: step and context at its end, the step from which on its tokens follow one another.
        self._members: dict[int, tuple[Request, int, int, int]] = {}
        self._log = StepLog()
        self._joined = 0
        self._num_fresh = 0  # whose first token ever is the next step's

    def join(self, request: Request, context: int, num_tokens: int, *, has_token: bool = True) -> None:
        """Add a request that holds `context` tokens and is to get `num_tokens` more; the first ever follows no other."""
        self._joined += 1
        self.num += 1
        self.context += context
        self.reserved += context + num_tokens
        self._num_fresh += not has_token
        end = self.steps + num_tokens
        self._members[self._joined] = request, end, context + num_tokens, self.steps + (not has_token)
        heapq.heappush(self._ends, (end, self._joined))

    @property
    def steps_to_next_end(self) -> int:
        """After so many steps the first of them has all its tokens."""
        while self._ends[0][1] not in self._members:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.steps

    def steps_within(self, kv_tokens: float) -> int:
        """So many steps, at least 1, before the contexts would be more than this."""
        return max(1, int((min(kv_tokens, _ENDLESS) - self.context) // self.num))

    def give_up_latest(self) -> tuple[Request, int]:
        """Take out who joined last; returns it with how many tokens it still was to get."""
        order = next(reversed(self._members))
        request, end, final, start = self._members.pop(order)
        request.decoded.append((self._log, start, self.steps))
        left = end - self.steps
        self.num -= 1
        self.context -= final - left
        self.reserved -= final
        return request, left

    def num_gaps(self, num_steps: int) -> int:
        """Of the tokens of so many steps, those that follow another one of their request."""
        return self.num * num_steps - self._num_fresh

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

    def advance(self, num_steps: int, seconds: float) -> list[Request]:
        """Take so many steps, which took so long together; returns those who then have all their tokens."""
        self.steps += num_steps
        self._num_fresh = 0
        self._log.add(num_steps, seconds / num_steps)
        self.context += self.num * num_steps
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            member = self._members.pop(heapq.heappop(self._ends)[1], None)
            if member is not None:
                request, _, context, start = member
                request.decoded.append((self._log, start, self.steps))
                self.num -= 1
                self.context -= context
                self.reserved -= context
                ended.append(request)
        return ended

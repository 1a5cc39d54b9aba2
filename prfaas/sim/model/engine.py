"""A decode batch whose runs of steps are advanced in closed form: who is in it, when each ends, how long k steps take."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.kernel.meter import Meter, StepLog, TokenGaps
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest

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
        self._members: dict[int, tuple[SimulatedRequest, int, int, int]] = {}
        self._log = StepLog()
        self._joined = 0
        self._num_fresh = 0  # whose first token ever is the next step's

    def join(self, request: SimulatedRequest, context: int, num_tokens: int, *, has_token: bool = True) -> None:
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

    def give_up_latest(self) -> tuple[SimulatedRequest, int]:
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
        """Return how long so many steps take while nobody joins or leaves."""
        return num_steps * self.fixed_seconds + self.own_seconds(num_steps)

    def steps_until(self, elapsed: float) -> int:
        """Return the least number of steps, at least 1, that take `elapsed` seconds or more."""
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

    def advance(self, num_steps: int, seconds: float) -> list[SimulatedRequest]:
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


@dataclass(frozen=True)
class InstanceSpec:
    """How an engine computes.

    `max_batch` requests decode at once and `kv_tokens` bound what they hold: at their end, so that a place is reserved when
    a request starts; or, if it `preempts`, at any moment: when a step does not fit, whoever joined last gives its KV up, is
    first in the queue again, and computes its prompt and what it had said anew (vLLM's recomputation; a prompt that is
    being computed is not given up, and nothing of the lost KV is found again). `chunk_tokens` is what an iteration takes of
    prompts and decode tokens together, several prompts if they fit; None: one whole prompt an iteration. A request whose KV
    has come from elsewhere holds up the iteration that takes it in by `load_seconds`.
    """

    prefill: PrefillProfile
    decode: DecodeProfile | None
    max_batch: int = 256
    kv_tokens: float = float("inf")
    chunk_tokens: int | None = None
    load_seconds: float = 0.0
    preempts: bool = False


class Prefill:
    """A prompt to compute: `new` tokens behind `cached` ones. One that `stays` decodes where it was prefilled.

    Of a preempted request: `owed` tokens are still to come, the last one came at `since`.
    """

    __slots__ = ("cached", "done", "new", "owed", "request", "since", "stays")

    def __init__(
        self, request: SimulatedRequest, new: int, cached: int, *, stays: bool, owed: int = 0, since: float = 0.0
    ) -> None:
        self.request, self.new, self.cached, self.stays = request, new, cached, stays
        self.owed, self.since = owed, since
        self.done = 0

    @property
    def num_tokens(self) -> int:
        return self.new + self.cached

    @property
    def left(self) -> int:
        return self.new - self.done


@dataclass(frozen=True)
class Callbacks:
    """What an engine tells: a prompt's last chunk starts and takes so long, it is prefilled, a request has all tokens."""

    on_last_chunk: Callable[[Prefill, float], None]
    on_prefilled: Callable[[Prefill], None]
    on_ended: Callable[[SimulatedRequest], None]


Chunk = list[tuple[Prefill, int]]


def give_up_latest(batch: DecodeBatch, now: float) -> Prefill:
    """Preempt who joined last: out of the batch, and what is to be computed before its next token."""
    request, owed = batch.give_up_latest()
    request.num_preemptions += 1
    return Prefill(
        request, request.num_prompt_tokens + request.num_output_tokens - owed, 0, stays=True, owed=owed, since=now
    )


class SimulatedInstance:
    """An engine on a timeline. `busy` are the seconds in which it computed anything.

    An iteration with prompts in it takes the greater of both fixed parts, the decode step's own part, and what the chunk
    adds: T(m | n) − T(0). Runs of pure decode steps are one event; who comes in the middle is taken in after the step
    that is under way.
    """

    def __init__(self, timeline: Timeline, spec: InstanceSpec, callbacks: Callbacks, gaps: TokenGaps) -> None:
        self.busy = Meter()
        self.held = Meter()  # token-seconds of KV
        self._timeline, self._spec, self._callbacks, self._gaps = timeline, spec, callbacks, gaps
        self._fixed_prefill = spec.prefill.seconds(0.0)
        self._batch = DecodeBatch(spec.decode)
        self._queue: deque[Prefill] = deque()
        self._current: list[Prefill] = []  # begun, not finished
        self._joining: deque[SimulatedRequest] = deque()  # their KV is here
        self._fresh: list[SimulatedRequest] = []  # decode without having had a token
        self._chunk: Chunk = []
        self._num_steps = 0  # of the iterations under way
        self._started = 0.0
        self._ends_at = 0.0
        self._version = 0
        self._idle = True
        self._is_stopped = False

    @property
    def kv_tokens(self) -> float:
        """What its memory holds."""
        return self._spec.kv_tokens

    def prefill(self, prefill: Prefill) -> None:
        """Queue a prompt; a stopped engine loses it."""
        if not self._is_stopped:
            self._queue.append(prefill)
            self._wake()

    def decode(self, request: SimulatedRequest) -> None:
        """Take over a request whose KV has arrived; the first step recomputes its last prompt token."""
        if not self._is_stopped:
            self._joining.append(request)
            self._wake()

    def forget(self, request: SimulatedRequest) -> None:
        """A prompt that still waits is not computed."""
        self._queue = deque(one for one in self._queue if one.request is not request)

    def stop(self) -> None:
        """Lose everything; nobody is told."""
        self._is_stopped, self._idle = True, True
        self._version += 1
        for held in (self._queue, self._current, self._joining, self._fresh):
            held.clear()
        self._chunk = []
        self._batch = DecodeBatch(self._spec.decode)

    def restart(self) -> None:
        """Take requests again."""
        self._is_stopped = False

    def _wake(self) -> None:
        if self._idle:
            self._iterate()
        elif not self._chunk and self._num_steps > 1:
            self._cut()

    def _cut(self) -> None:
        """End a run of decode steps with the step that is under way."""
        steps = self._batch.steps_until(self._timeline.now - self._started)
        if steps < self._num_steps:
            self._begin_at(self._started, steps, self._batch.seconds(steps))

    def _iterate(self) -> None:
        self._make_room()
        loading = self._admit() * self._spec.load_seconds
        self._chunk = self._next_chunk()
        self._idle = not self._chunk and not self._batch.num
        if self._idle:
            return
        steps = 1 if self._chunk or loading else self._num_equal_steps()
        seconds = loading + (self._mixed_seconds() if self._chunk else self._batch.seconds(steps))
        now = self._timeline.now
        self._begin_at(now, steps, seconds)
        self._give_first_tokens(now + (seconds if steps == 1 else self._batch.seconds(1)))
        for prefill, tokens in self._chunk:
            self._started_on(prefill, tokens, seconds)

    def _begin_at(self, started: float, steps: int, seconds: float) -> None:
        self._started, self._num_steps, self._ends_at = started, steps, started + seconds
        self._version += 1
        self._timeline.at(self._ends_at, self._end, self._version)

    def _give_first_tokens(self, moment: float) -> None:
        for request in self._fresh:
            request.first_token = moment
        self._fresh.clear()

    def _started_on(self, prefill: Prefill, tokens: int, seconds: float) -> None:
        if prefill.owed:
            return
        if not prefill.done:
            prefill.request.prefill_start = self._timeline.now
        if tokens == prefill.left:
            self._callbacks.on_last_chunk(prefill, seconds)

    def _num_equal_steps(self) -> int:
        """Until somebody ends, or the memory is full."""
        steps = self._batch.steps_to_next_end
        if self._spec.preempts and self._batch.num > 1:
            steps = min(steps, self._batch.steps_within(self._spec.kv_tokens))
        return steps

    def _make_room(self) -> None:
        """Preempt whoever joined last until the next step fits."""
        if not self._spec.preempts:
            return
        prompts = sum(one.num_tokens for one in self._current if one.stays)
        while self._batch.num > 1 and self._batch.context + self._batch.num + prompts > self._spec.kv_tokens:
            self._queue.appendleft(give_up_latest(self._batch, self._timeline.now))

    def _admit(self) -> int:
        """Take in who fits, preempted requests first; how many those are."""
        admitted = 0
        while self._joining and not (self._queue and self._queue[0].owed):
            request = self._joining[0]
            if not self._has_room(request, request.num_prompt_tokens):
                break
            self._joining.popleft()
            request.decode_start = self._timeline.now
            self._batch.join(request, request.num_prompt_tokens, request.num_output_tokens, has_token=False)
            self._fresh.append(request)
            admitted += 1
        return admitted

    def _has_room(self, request: SimulatedRequest, num_tokens: int) -> bool:
        """Return whether a request that holds so many tokens by its next step may start."""
        staying = [one for one in self._current if one.stays]
        if self._spec.preempts:
            held = self._batch.context + sum(one.num_tokens for one in staying)
            asked = self._batch.num + num_tokens + 1
        else:
            held = self._batch.reserved + sum(_held(one.request) for one in staying)
            asked = _held(request)
        fits = held + asked <= self._spec.kv_tokens or not held
        return fits and self._batch.num + len(staying) < self._spec.max_batch

    def _next_chunk(self) -> Chunk:
        if self._spec.chunk_tokens is None:
            self._start_next()
            return [(one, one.left) for one in self._current]
        budget, chunk = self._spec.chunk_tokens - self._batch.num, []
        for prefill in self._current:
            if budget > 0:
                chunk.append((prefill, min(prefill.left, budget)))
                budget -= chunk[-1][1]
        while budget > 0 and self._start_next():
            chunk.append((self._current[-1], min(self._current[-1].left, budget)))
            budget -= chunk[-1][1]
        return chunk

    def _start_next(self) -> bool:
        """Begin the next prompt of the queue; one that stays needs a place in the batch first."""
        if not self._queue:
            return False
        first = self._queue[0]
        if first.stays and not self._has_room(first.request, first.num_tokens):
            return False
        self._current.append(self._queue.popleft())
        return True

    def _mixed_seconds(self) -> float:
        profile, fixed = self._spec.prefill, self._fixed_prefill
        added = sum(profile.seconds(tokens, one.cached + one.done) - fixed for one, tokens in self._chunk)
        return max(fixed, self._batch.fixed_seconds) + self._batch.own_seconds(1) + added

    def _end(self, version: int) -> None:
        if version != self._version:  # the run was cut
            return
        now, passed = self._timeline.now, self._timeline.now - self._started
        self.busy.add(self._started, now, passed)
        prompts = sum(one.num_tokens for one in self._current if one.stays)
        self.held.add(self._started, now, passed * (self._batch.context + prompts))
        steps, self._num_steps = self._num_steps, 1  # nothing is left to cut for whoever comes from here on
        if self._batch.num:
            self._gaps.add(passed / steps, self._batch.num_gaps(steps))
            for request in self._batch.advance(steps, passed):
                self._ended(request)
        for prefill, tokens in self._chunk:
            prefill.done += tokens
            if not prefill.left:
                self._finish(prefill)
        self._iterate()

    def _finish(self, prefill: Prefill) -> None:
        self._current.remove(prefill)
        request, now = prefill.request, self._timeline.now
        if prefill.owed:
            self._resume(prefill)
            return
        request.prefill_end = now
        if prefill.stays:
            request.transfer_end = request.decode_start = request.first_token = now
            if request.num_output_tokens > 1:
                self._batch.join(request, request.num_prompt_tokens, request.num_output_tokens - 1)
            else:
                self._ended(request)
        self._callbacks.on_prefilled(prefill)

    def _resume(self, prefill: Prefill) -> None:
        """What a preempted request had is there again, and its next token with it."""
        stall = self._timeline.now - prefill.since
        self._gaps.add(stall, 1)
        prefill.request.stalls.append(stall)
        if prefill.owed > 1:
            self._batch.join(prefill.request, prefill.num_tokens, prefill.owed - 1)
        else:
            self._ended(prefill.request)

    def _ended(self, request: SimulatedRequest) -> None:
        request.decode_end = self._timeline.now
        self._callbacks.on_ended(request)


def _held(request: SimulatedRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens

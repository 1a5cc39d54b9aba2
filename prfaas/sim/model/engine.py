"""Simulated engine with continuous batching.

Runs of equal decode steps are advanced in closed form, as one event.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.kernel.meter import Meter, StepLog
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest

_ENDLESS = 1 << 62  # tokens


class DecodeBatch:
    """Requests that decode together; each step gives one token to each request.

    `steps` counts the steps so far. `context` is the sum of the requests' contexts in tokens.
    """

    def __init__(self, profile: DecodeProfile | None) -> None:
        self.num = 0
        self.context = 0
        self.steps = 0
        self._base, self._each, self._token = (
            (0.0, 0.0, 0.0)
            if profile is None
            else (profile.base_seconds, profile.seconds_per_request, profile.seconds_per_context_token)
        )
        # Heap of (last step, order of joining). Entries of preempted requests remain until they are popped.
        self._ends: list[tuple[int, int]] = []
        # By order of joining: request, last step, final context, and the step that gave the token before its first gap.
        self._members: dict[int, tuple[SimulatedRequest, int, int, int]] = {}
        self._log = StepLog()
        self._joined = 0

    def join(self, request: SimulatedRequest, context: int, num_tokens: int, *, has_token: bool = True) -> None:
        """Add a request that holds `context` tokens and will get `num_tokens` more."""
        self._joined += 1
        self.num += 1
        self.context += context
        end = self.steps + num_tokens
        self._members[self._joined] = request, end, context + num_tokens, self.steps + (not has_token)
        heapq.heappush(self._ends, (end, self._joined))

    @property
    def steps_to_next_end(self) -> int:
        """Return the steps until the first request has all of its tokens."""
        while self._ends[0][1] not in self._members:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.steps

    def steps_within(self, kv_tokens: float) -> int:
        """Return the steps, at least 1, before the contexts exceed `kv_tokens`."""
        return max(1, int((min(kv_tokens, _ENDLESS) - self.context) // self.num))

    def give_up_latest(self) -> tuple[SimulatedRequest, int]:
        """Remove the request that joined last. Return it and the number of tokens it still lacks."""
        order = next(reversed(self._members))
        request, end, final, start = self._members.pop(order)
        request.decoded.append((self._log, start, self.steps))
        left = end - self.steps
        self.num -= 1
        self.context -= final - left
        return request, left

    @property
    def fixed_seconds(self) -> float:
        """Return the part of a step's seconds that does not depend on the batch."""
        return self._base if self.num else 0.0

    def own_seconds(self, num_steps: int) -> float:
        """Return the seconds that the requests add to `num_steps` steps. Each step adds one token to each context."""
        grown = self.num * num_steps * (num_steps - 1) / 2
        return num_steps * (self._each * self.num + self._token * self.context) + self._token * grown

    def seconds(self, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps while no request joins or leaves."""
        return num_steps * self.fixed_seconds + self.own_seconds(num_steps)

    def steps_until(self, elapsed: float) -> int:
        """Return the least number of steps, at least 1, that takes `elapsed` seconds or more."""
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
        """Take `num_steps` steps that took `seconds` together. Return the requests that now have all tokens."""
        self.steps += num_steps
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
                ended.append(request)
        return ended


@dataclass(frozen=True)
class InstanceSpec:
    """Properties of an engine.

    At most `max_batch` requests decode at once, and `kv_tokens` bounds the tokens they hold. If a step does not fit, the
    request that joined last gives up its KV and is computed again, prompt and output, before other queued prompts
    (vLLM's recomputation).

    `chunk_tokens` bounds prompt and decode tokens of one iteration; None computes one whole prompt per iteration.
    KV that arrives from another node delays the iteration that admits it by `load_seconds`.
    """

    prefill: PrefillProfile
    decode: DecodeProfile | None
    max_batch: int = 256
    kv_tokens: float = float("inf")
    chunk_tokens: int | None = None
    load_seconds: float = 0.0


class Prefill:
    """Prompt to compute: `new` tokens behind `cached` ones. If it `stays`, the request also decodes on this instance.

    For a preempted request, `owed` is the number of tokens still to come, and its last token came at `since`.
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
    """Notifications of an engine: the last chunk of a prompt starts and takes so many seconds, the prompt is prefilled,
    a request has all tokens."""

    on_last_chunk: Callable[[Prefill, float], None]
    on_prefilled: Callable[[Prefill], None]
    on_ended: Callable[[SimulatedRequest], None]


class SimulatedEngine:
    """State and memory rules that all simulated engines share.

    `busy` counts the seconds in which the engine computed anything.
    """

    def __init__(self, timeline: Timeline, spec: InstanceSpec, callbacks: Callbacks) -> None:
        self.busy = Meter()
        self._timeline, self._spec, self._callbacks = timeline, spec, callbacks
        self._batch = DecodeBatch(spec.decode)
        self._queue: deque[Prefill] = deque()
        # Requests that decode and have no token yet.
        self._fresh: list[SimulatedRequest] = []
        # Events carry the version at which they were planned, and are void if it has changed.
        self._version = 0
        self._is_stopped = False

    @property
    def kv_tokens(self) -> float:
        """Return the tokens that the KV memory holds."""
        return self._spec.kv_tokens

    @property
    def num_running(self) -> int:
        """Return the requests that decode."""
        return self._batch.num

    @property
    def num_waiting(self) -> int:
        """Return the requests that have not begun."""
        return len(self._queue)

    @property
    def kv_usage_ratio(self) -> float:
        """Return the share of the KV memory that decoding requests hold."""
        return min(1.0, self._batch.context / self._spec.kv_tokens)

    def prefill(self, prefill: Prefill) -> None:
        """Queue a prompt; a stopped engine loses it."""
        if not self._is_stopped:
            self._queue.append(prefill)
            self._start_queued()

    def _start_queued(self) -> None:
        raise NotImplementedError

    def decode(self, request: SimulatedRequest) -> None:
        """Take over a request whose KV has arrived; the first step computes its last prompt token again."""
        raise NotImplementedError

    def forget(self, request: SimulatedRequest) -> None:
        """Remove the queued prompt of a request."""
        self._queue = deque(prefill for prefill in self._queue if prefill.request is not request)

    def stop(self) -> None:
        """Lose all requests without a notification."""
        self._is_stopped = True
        self._version += 1
        self._queue.clear()
        self._fresh.clear()
        self._batch = DecodeBatch(self._spec.decode)

    def restart(self) -> None:
        """Accept requests again."""
        self._is_stopped = False

    def _has_room(self, prefill: Prefill, staying: Collection[Prefill]) -> bool:
        """Return whether a request may start in addition to the batch and the prompts that will join it."""
        held = self._batch.context + sum(prompt.num_tokens for prompt in staying)
        asked = self._batch.num + prefill.num_tokens + 1
        fits = held + asked <= self._spec.kv_tokens or not held
        return fits and self._batch.num + len(staying) < self._spec.max_batch

    def _make_room(self, prompt_tokens: int) -> None:
        """Preempt the requests that joined last until the next step fits together with the prompts."""
        batch, now = self._batch, self._timeline.now
        while batch.num > 1 and batch.context + batch.num + prompt_tokens > self._spec.kv_tokens:
            request, owed = batch.give_up_latest()
            request.num_preemptions += 1
            new = request.num_prompt_tokens + request.num_output_tokens - owed
            self._queue.appendleft(Prefill(request, new, 0, stays=True, owed=owed, since=now))

    def _note_stall(self, prefill: Prefill) -> None:
        """Count the gap before the next token of a preempted request that has been computed again."""
        prefill.request.stalls.append(self._timeline.now - prefill.since)

    def _ended(self, request: SimulatedRequest) -> None:
        request.decode_end = self._timeline.now
        self._callbacks.on_ended(request)


class SimulatedInstance(SimulatedEngine):
    """Engine that computes prompts and decode steps in common iterations.

    An iteration with prompts takes the greater of both fixed parts, the decode step's own part, and T(m | n) − T(0) for
    each chunk. A run of pure decode steps is one event. A request that arrives during it is admitted after the current
    step.
    """

    def __init__(self, timeline: Timeline, spec: InstanceSpec, callbacks: Callbacks) -> None:
        super().__init__(timeline, spec, callbacks)
        self._fixed_prefill = spec.prefill.seconds(0.0)
        # Prompts that have begun and are not finished.
        self._current: list[Prefill] = []
        self._joining: deque[SimulatedRequest] = deque()
        # Prompt tokens of the current iteration.
        self._chunk: list[tuple[Prefill, int]] = []
        self._num_steps = 0
        self._started = 0.0
        self._is_idle = True

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._joining)

    def decode(self, request: SimulatedRequest) -> None:
        if not self._is_stopped:
            self._joining.append(request)
            self._start_queued()

    def stop(self) -> None:
        super().stop()
        self._is_idle = True
        self._current.clear()
        self._joining.clear()
        self._chunk = []

    def _start_queued(self) -> None:
        if self._is_idle:
            self._iterate()
        elif not self._chunk and self._num_steps > 1:
            self._end_run_after_current_step()

    def _end_run_after_current_step(self) -> None:
        steps = self._batch.steps_until(self._timeline.now - self._started)
        if steps < self._num_steps:
            self._begin(self._started, steps, self._batch.seconds(steps))

    def _iterate(self) -> None:
        self._make_room(sum(prompt.num_tokens for prompt in self._staying()))
        loading = self._admit() * self._spec.load_seconds
        self._chunk = self._next_chunk()
        self._is_idle = not self._chunk and not self._batch.num
        if self._is_idle:
            return
        steps = 1 if self._chunk or loading else self._num_equal_steps()
        seconds = loading + (self._mixed_seconds() if self._chunk else self._batch.seconds(steps))
        now = self._timeline.now
        self._begin(now, steps, seconds)
        first_token = now + (seconds if steps == 1 else self._batch.seconds(1))
        for request in self._fresh:
            request.first_token = first_token
        self._fresh.clear()
        for prefill, tokens in self._chunk:
            self._note_start(prefill, tokens, seconds)

    def _begin(self, started: float, steps: int, seconds: float) -> None:
        self._started, self._num_steps = started, steps
        self._version += 1
        self._timeline.at(started + seconds, self._end, self._version)

    def _note_start(self, prefill: Prefill, tokens: int, seconds: float) -> None:
        if prefill.owed:
            return
        if not prefill.done:
            prefill.request.prefill_start = self._timeline.now
        if tokens == prefill.left:
            self._callbacks.on_last_chunk(prefill, seconds)

    def _num_equal_steps(self) -> int:
        """Return the steps until a request ends or the memory is full."""
        steps = self._batch.steps_to_next_end
        if self._batch.num > 1:
            steps = min(steps, self._batch.steps_within(self._spec.kv_tokens))
        return steps

    def _staying(self) -> list[Prefill]:
        return [prompt for prompt in self._current if prompt.stays]

    def _admit(self) -> int:
        """Admit requests that fit, and return their number. Preempted requests come first."""
        admitted = 0
        while self._joining and not (self._queue and self._queue[0].owed):
            request = self._joining[0]
            if not self._has_room(Prefill(request, request.num_prompt_tokens, 0, stays=True), self._staying()):
                break
            self._joining.popleft()
            request.decode_start = self._timeline.now
            self._batch.join(request, request.num_prompt_tokens, request.num_output_tokens, has_token=False)
            self._fresh.append(request)
            admitted += 1
        return admitted

    def _next_chunk(self) -> list[tuple[Prefill, int]]:
        if self._spec.chunk_tokens is None:
            self._start_next()
            return [(prompt, prompt.left) for prompt in self._current]
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
        """Begin the next queued prompt. A prompt that stays needs a place in the batch first."""
        if not self._queue or (self._queue[0].stays and not self._has_room(self._queue[0], self._staying())):
            return False
        self._current.append(self._queue.popleft())
        return True

    def _mixed_seconds(self) -> float:
        profile, fixed = self._spec.prefill, self._fixed_prefill
        added = sum(profile.seconds(tokens, prompt.cached + prompt.done) - fixed for prompt, tokens in self._chunk)
        return max(fixed, self._batch.fixed_seconds) + self._batch.own_seconds(1) + added

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        now, passed = self._timeline.now, self._timeline.now - self._started
        self.busy.add(self._started, now, passed)
        # From here on nothing is left of the run that an arrival could shorten.
        steps, self._num_steps = self._num_steps, 1
        if self._batch.num:
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
            self._note_stall(prefill)
            self._join_or_end(request, prefill.num_tokens, prefill.owed - 1)
            return
        request.prefill_end = now
        if prefill.stays:
            request.transfer_end = request.decode_start = request.first_token = now
            self._join_or_end(request, request.num_prompt_tokens, request.num_output_tokens - 1)
        self._callbacks.on_prefilled(prefill)

    def _join_or_end(self, request: SimulatedRequest, context: int, num_tokens: int) -> None:
        if num_tokens > 0:
            self._batch.join(request, context, num_tokens)
        else:
            self._ended(request)

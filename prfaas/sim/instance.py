"""One engine with continuous batching: iterations that hold decode steps, prompts in chunks, or both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.model.profile import DecodeProfile, PrefillProfile
from prfaas.sim.batch import DecodeBatch
from prfaas.sim.gaps import Gaps
from prfaas.sim.request import Request
from prfaas.sim.timeline import Timeline


@dataclass(frozen=True)
class EngineSpec:
    """How an engine computes.

    `max_batch` requests decode at once and `kv_tokens` bound what they hold at their end (no request is preempted: its
    place is reserved when it starts). `chunk_tokens` is what an iteration takes of prompts and decode tokens together,
    several prompts if they fit; None: one whole prompt an iteration. A request whose KV has come from elsewhere holds up
    the iteration that takes it in by `load_seconds`.
    """

    prefill: PrefillProfile
    decode: DecodeProfile | None
    max_batch: int = 256
    kv_tokens: float = float("inf")
    chunk_tokens: int | None = None
    load_seconds: float = 0.0


class Prefill:
    """A prompt to compute: `new` tokens behind `cached` ones. One that `stays` decodes where it was prefilled."""

    __slots__ = ("cached", "done", "new", "request", "stays")

    def __init__(self, request: Request, new: int, cached: int, *, stays: bool) -> None:
        self.request, self.new, self.cached, self.stays = request, new, cached, stays
        self.done = 0

    @property
    def left(self) -> int:
        return self.new - self.done


@dataclass(frozen=True)
class Callbacks:
    """What an engine tells: a prompt's last chunk starts and takes so long, it is prefilled, a request has all tokens."""

    on_last_chunk: Callable[[Prefill, float], None]
    on_prefilled: Callable[[Prefill], None]
    on_ended: Callable[[Request], None]


Chunk = list[tuple[Prefill, int]]


class Instance:
    """An engine on a timeline. `busy_seconds` is the time in which it computed anything.

    An iteration with prompts in it takes the greater of both fixed parts, the decode step's own part, and what the chunk
    adds: T(m | n) − T(0). Runs of pure decode steps are one event; who comes in the middle is taken in after the step
    that is under way.
    """

    def __init__(self, timeline: Timeline, spec: EngineSpec, callbacks: Callbacks, gaps: Gaps) -> None:
        self.busy_seconds = 0.0
        self._timeline, self._spec, self._callbacks, self._gaps = timeline, spec, callbacks, gaps
        self._fixed_prefill = spec.prefill.seconds(0.0)
        self._batch = DecodeBatch(spec.decode)
        self._queue: deque[Prefill] = deque()
        self._current: list[Prefill] = []  # begun, not finished
        self._joining: deque[Request] = deque()  # their KV is here
        self._fresh: list[Request] = []  # decode without having had a token
        self._chunk: Chunk = []
        self._num_steps = 0  # of the iterations under way
        self._started = 0.0
        self._ends_at = 0.0
        self._version = 0
        self._idle = True
        self._is_stopped = False

    def prefill(self, prefill: Prefill) -> None:
        """Queue a prompt; a stopped engine loses it."""
        if not self._is_stopped:
            self._queue.append(prefill)
            self._wake()

    def decode(self, request: Request) -> None:
        """Take over a request whose KV has arrived; the first step recomputes its last prompt token."""
        if not self._is_stopped:
            self._joining.append(request)
            self._wake()

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
        loading = self._admit() * self._spec.load_seconds
        self._chunk = self._next_chunk()
        self._idle = not self._chunk and not self._batch.num
        if self._idle:
            return
        steps = 1 if self._chunk or loading else self._batch.steps_to_next_end
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
        if not prefill.done:
            prefill.request.prefill_start = self._timeline.now
        if tokens == prefill.left:
            self._callbacks.on_last_chunk(prefill, seconds)

    def _admit(self) -> int:
        """Take in who fits; how many those are."""
        admitted = 0
        while self._joining and self._has_room(self._joining[0]):
            request = self._joining.popleft()
            request.decode_start = self._timeline.now
            self._batch.join(request, request.num_prompt_tokens, request.num_output_tokens)
            self._fresh.append(request)
            admitted += 1
        return admitted

    def _has_room(self, request: Request) -> bool:
        staying = [one for one in self._current if one.stays]
        held = self._batch.reserved + sum(_held(one.request) for one in staying)
        fits = held + _held(request) <= self._spec.kv_tokens or not held
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
        if not self._queue or (self._queue[0].stays and not self._has_room(self._queue[0].request)):
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
        passed = self._timeline.now - self._started
        self.busy_seconds += passed
        steps, self._num_steps = self._num_steps, 1  # nothing is left to cut for whoever comes from here on
        if self._batch.num:
            self._gaps.add(passed / steps, self._batch.num * steps)
            for request in self._batch.advance(steps):
                self._ended(request)
        for prefill, tokens in self._chunk:
            prefill.done += tokens
            if not prefill.left:
                self._finish(prefill)
        self._iterate()

    def _finish(self, prefill: Prefill) -> None:
        self._current.remove(prefill)
        request, now = prefill.request, self._timeline.now
        request.prefill_end = now
        if prefill.stays:
            request.transfer_end = request.decode_start = request.first_token = now
            if request.num_output_tokens > 1:
                self._batch.join(request, request.num_prompt_tokens, request.num_output_tokens - 1)
            else:
                self._ended(request)
        self._callbacks.on_prefilled(prefill)

    def _ended(self, request: Request) -> None:
        request.decode_end = self._timeline.now
        self._callbacks.on_ended(request)


def _held(request: Request) -> int:
    return request.num_prompt_tokens + request.num_output_tokens

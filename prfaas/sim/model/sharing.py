"""How fast two sides share a device, by what `prfaas-colocate profile` measured there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import OVERALLOCATED, Partition, Sharing, SharingPolicy, StepLoad, next_sharing
from prfaas.sim.kernel.meter import Meter, TokenGaps
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, DecodeBatch, InstanceSpec, Prefill, give_up_latest
from prfaas.sim.model.request import SimulatedRequest
from prfaas.solve.files.profile_file import read_colocation, read_profile

Points = tuple[tuple[float, float], ...]  # (share of the compute units, speed relative to the whole device alone)


@dataclass(frozen=True)
class MeasuredSharing:
    """Speeds of both sides, each relative to having the device to itself; straight lines between the measured shares."""

    decode: Points
    prefill: Points
    overallocated_decode: float
    overallocated_prefill: float

    @property
    def best_decode_speed(self) -> float:
        """On the share that decode likes best."""
        return max(speed for _, speed in self.decode)

    @property
    def overlap(self) -> float:
        """What an instance gains by sharing, in instances: the best a + b − 1 of a split, or over-allocated."""
        splits = (Partition(share, 1.0 - share) for share, _ in self.decode)
        return max(self.decode_speed(split) + self.prefill_speed(split) for split in (*splits, OVERALLOCATED)) - 1.0

    def decode_speed(self, partition: Partition) -> float:
        """Of the decode side under a partition, prefill being busy where it has a share."""
        if not partition.prefill_share:
            return 1.0
        return self.overallocated_decode if partition == OVERALLOCATED else _at(self.decode, partition.decode_share)

    def prefill_speed(self, partition: Partition) -> float:
        """Of the prefill side under a partition, decode being busy where it has a share."""
        if not partition.decode_share:
            return 1.0
        return self.overallocated_prefill if partition == OVERALLOCATED else _at(self.prefill, partition.prefill_share)


def read_sharing(file: Path) -> MeasuredSharing:
    """What a measured profile says.

    Raises:
        ConfigError: the file cannot be read, or lacks a measurement: decode alone, or prefill with everything over-allocated.
    """
    its, profile = read_colocation(file), read_profile(file)
    alone = profile.decode
    if alone is None:
        raise ConfigError(f"{file}: decode: no points of decode alone")
    batches = [alone.step_seconds(batch, its.context_tokens) for batch in its.decode.batches]
    columns = list(zip(*its.decode.seconds, strict=True))
    prefill: dict[float, list[float]] = {}  # by share, a speed for each prompt length
    for one in its.prefill:
        prefill.setdefault(one.share, []).append(profile.prefill.seconds(one.num_tokens) / one.seconds)
    if 1.0 not in prefill:
        raise ConfigError(f"{file}: colocation: prefill: no point with a share of 1, which is over-allocation")
    return MeasuredSharing(
        decode=_points(zip(its.decode.shares, (_speed(batches, column) for column in columns), strict=True)),
        prefill=_points((share, min(1.0, median(speeds))) for share, speeds in prefill.items() if share < 1.0),
        overallocated_decode=_speed(batches, its.decode.overallocated_seconds),
        overallocated_prefill=min(1.0, median(prefill[1.0])),
    )


def _speed(alone: Sequence[float], shared: Sequence[float]) -> float:
    """Return the median over the batches; never above 1, which only noise is."""
    return min(1.0, median(one / other for one, other in zip(alone, shared, strict=True)))


def _points(pairs: Iterable[tuple[float, float]]) -> Points:
    return tuple(sorted(pairs))


def _at(points: Points, share: float) -> float:
    """On a line from nothing at no share; as at the greatest measured share beyond it."""
    shares, speeds = zip((0.0, 0.0), *points, strict=True)
    return float(np.interp(share, shares, speeds))


@dataclass(frozen=True)
class ModelledSharing:
    """How fast each side is, relative to having the device to itself.

    Decode is at its peak from `decode_peak_share` of the compute units on, and in proportion below; prefill is in
    proportion to its share. What both do at once costs decode `decode_memory_ratio` and prefill `prefill_memory_ratio` of
    their speed (memory bandwidth). Over-allocated, prefill keeps `overallocated_prefill` of its speed and decode
    `overallocated_decode`.
    """

    decode_peak_share: float = 0.45
    decode_memory_ratio: float = 0.035
    prefill_memory_ratio: float = 0.02
    overallocated_prefill: float = 0.75
    overallocated_decode: float = 0.6

    @property
    def best_decode_speed(self) -> float:
        """On a share that is large enough."""
        return 1.0 - self.decode_memory_ratio

    @property
    def overlap(self) -> float:
        """What an instance gains by sharing, in instances: a + b − 1 of the greatest shares of both roles."""
        both = Partition(self.decode_peak_share, 1.0 - self.decode_peak_share)
        return self.decode_speed(both) + self.prefill_speed(both) - 1.0

    def decode_speed(self, partition: Partition) -> float:
        """Of the decode side under a partition, prefill being busy where it has a share."""
        if not partition.prefill_share:
            return 1.0
        if partition == OVERALLOCATED:
            return self.overallocated_decode
        return min(1.0, partition.decode_share / self.decode_peak_share) * (1.0 - self.decode_memory_ratio)

    def prefill_speed(self, partition: Partition) -> float:
        """Of the prefill side under a partition, decode being busy where it has a share."""
        if not partition.decode_share:
            return 1.0
        if partition == OVERALLOCATED:
            return self.overallocated_prefill
        return partition.prefill_share * (1.0 - self.prefill_memory_ratio)


class SharingSpeeds(Protocol):
    """How fast both sides are under a partition: RAPID-Serve's figures (`Interference`), or measured (`MeasuredSharing`)."""

    @property
    def best_decode_speed(self) -> float:
        """Return the greatest speed that decode has beside a prefill."""

    @property
    def overlap(self) -> float:
        """What an instance gains by sharing, in instances."""

    def decode_speed(self, partition: Partition) -> float:
        """Relative to the whole device alone."""

    def prefill_speed(self, partition: Partition) -> float:
        """Relative to the whole device alone."""


def share_table(spec: InstanceSpec, interference: SharingSpeeds, *, context_tokens: float) -> ShareTable:
    """What the resource manager learns offline: steps at contexts of so many tokens, by batch and share."""
    assert spec.decode is not None, "a shared instance decodes"
    shares = tuple(step / 20 for step in range(2, 19))
    batches = tuple(batch for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if batch <= spec.max_batch)
    alone = [spec.decode.step_seconds(batch, context_tokens) for batch in batches]
    speeds = [interference.decode_speed(Partition(share, 1 - share)) for share in shares]
    return ShareTable(
        shares,
        batches,
        tuple(tuple(seconds / speed for speed in speeds) for seconds in alone),
        tuple(seconds / interference.decode_speed(OVERALLOCATED) for seconds in alone),
    )


@dataclass(frozen=True)
class SharingSpec:
    """How a device is shared: the speeds, the manager's policy, and the context length of its offline profile."""

    policy: SharingPolicy
    interference: SharingSpeeds = field(default_factory=ModelledSharing)
    context_tokens: float = 8192.0


class SharedInstance:
    """Takes what an `Instance` takes. Prompts are prefilled whole, one after the other, while the others decode.

    The partition is asked for before each decode step (`scheduler.colocation.next_sharing`), or when a prompt starts while
    nobody decodes; each decode step is an event, since the next may be under another one. `reasons` counts the steps by
    the reason of their partition.
    """

    def __init__(
        self, timeline: Timeline, spec: InstanceSpec, callbacks: Callbacks, gaps: TokenGaps, *, sharing: SharingSpec
    ) -> None:
        self.busy = Meter()
        self.held = Meter()  # token-seconds of KV
        self.reasons: dict[str, int] = {}
        self._timeline, self._spec, self._callbacks, self._gaps = timeline, spec, callbacks, gaps
        self._interference, self._policy = sharing.interference, sharing.policy
        self._profile = share_table(spec, sharing.interference, context_tokens=sharing.context_tokens)
        self._batch = DecodeBatch(spec.decode)
        self._queue: deque[Prefill] = deque()
        self._joining: deque[Prefill] = deque()  # their KV is here
        self._current: Prefill | None = None
        self._work_left = 0.0  # of the current prompt, in seconds of the whole device
        self._speed = 1.0
        self._moved_at = 0.0
        self._version = 0
        self._sharing = Sharing()
        self._is_stepping = False
        self._is_stopped = False
        self._life = 0  # counts the stops: a step of an earlier life has no end
        self._fresh: list[SimulatedRequest] = []  # decode without having had a token

    @property
    def kv_tokens(self) -> float:
        """What its memory holds."""
        return self._spec.kv_tokens

    def prefill(self, prefill: Prefill) -> None:
        """Queue a prompt; a stopped engine loses it."""
        if not self._is_stopped:
            self._queue.append(prefill)
            self._start_prompt()

    def decode(self, request: SimulatedRequest) -> None:
        """Take over a request whose KV is here."""
        if self._is_stopped:
            return
        self._joining.append(Prefill(request, 0, request.num_prompt_tokens, stays=True))
        if not self._is_stepping:
            self._step()

    def forget(self, request: SimulatedRequest) -> None:
        """A prompt that still waits is not computed."""
        self._queue = deque(one for one in self._queue if one.request is not request)

    def stop(self) -> None:
        """Lose everything; nobody is told."""
        self._is_stopped, self._is_stepping, self._current = True, False, None
        self._version += 1
        self._life += 1
        for held in (self._queue, self._joining, self._fresh):
            held.clear()
        self._batch = DecodeBatch(self._spec.decode)

    def restart(self) -> None:
        """Take requests again."""
        self._is_stopped = False

    # Prefill side

    def _start_prompt(self) -> None:
        if self._current is not None or not self._queue or not self._has_room(self._queue[0]):
            return
        self._current = self._queue.popleft()
        self._moved_at = self._timeline.now
        self._work_left = self._spec.prefill.seconds(self._current.new, self._current.cached)
        if not self._is_stepping:
            self._share()
        if not self._current.owed:
            self._current.request.prefill_start = self._timeline.now
            self._callbacks.on_last_chunk(self._current, self._work_left / max(self._speed, 1e-9))
        self._await_prompt()

    def _has_room(self, prefill: Prefill) -> bool:
        if self._spec.preempts:
            held = self._batch.context + self._joining_tokens()
            asked = self._batch.num + prefill.num_tokens + 1
        else:
            held = self._batch.reserved + sum(_held(one.request) for one in self._joining)
            asked = _held(prefill.request)
        fits = held + asked <= self._spec.kv_tokens or not held
        return fits and self._batch.num + len(self._joining) < self._spec.max_batch

    def _joining_tokens(self) -> int:
        return sum(one.num_tokens for one in self._joining)

    def _make_room(self) -> None:
        """Preempt whoever joined last until the next step fits beside the prompt under way."""
        if not self._spec.preempts:
            return
        prompts = self._joining_tokens() + (self._current.num_tokens if self._current else 0)
        while self._batch.num > 1 and self._batch.context + self._batch.num + prompts > self._spec.kv_tokens:
            self._queue.appendleft(give_up_latest(self._batch, self._timeline.now))

    def _move(self) -> None:
        """Let the current prompt be computed until now."""
        before, self._moved_at = self._moved_at, self._timeline.now
        passed = self._moved_at - before
        if self._current is not None:
            self._work_left -= passed * self._speed
            self.held.add(before, self._moved_at, passed * self._current.num_tokens)
            if not self._is_stepping:
                self.busy.add(before, self._moved_at, passed)

    def _await_prompt(self) -> None:
        self._version += 1
        if self._current is not None and self._speed:
            self._timeline.at(
                self._timeline.now + max(self._work_left, 0.0) / self._speed, self._prompt_done, self._version
            )

    def _prompt_done(self, version: int) -> None:
        if version != self._version:  # its speed has changed since
            return
        self._move()
        done, self._current = self._current, None
        assert done is not None, "a prompt that nobody computes is not awaited"
        if done.owed:
            stall = self._timeline.now - done.since
            self._gaps.add(stall, 1)
            done.request.stalls.append(stall)
        else:
            request = done.request
            request.prefill_end = request.transfer_end = request.first_token = self._timeline.now
        if done.stays and (done.owed or done.request.num_output_tokens) > 1:
            self._joining.append(done)
        elif done.stays:
            self._ended(done.request)
        if not done.owed:
            self._callbacks.on_prefilled(done)
        self._start_prompt()
        if not self._is_stepping:
            self._step()

    # Decode side

    def _share(self) -> None:
        """Ask for the partition, and let the prompt go on at its speed."""
        self._move()
        load = StepLoad(self._batch.num, self._current is not None)
        self._sharing = next_sharing(self._sharing, load, self._profile, policy=self._policy)
        self.reasons[self._sharing.reason] = self.reasons.get(self._sharing.reason, 0) + 1
        self._speed = self._interference.prefill_speed(self._sharing.partition)
        self._await_prompt()

    def _step(self) -> None:
        self._make_room()
        while self._joining and (self._batch.num < self._spec.max_batch):
            self._join(self._joining.popleft())
        self._is_stepping = bool(self._batch.num)
        self._share()
        if self._is_stepping:
            seconds = self._batch.seconds(1) / self._interference.decode_speed(self._sharing.partition)
            self._timeline.at(self._timeline.now + seconds, self._stepped, (seconds, self._life))

    def _join(self, prefilled: Prefill) -> None:
        """One whose KV came from elsewhere has had no token: its last prompt token is computed again."""
        request = prefilled.request
        if prefilled.owed:
            self._batch.join(request, prefilled.num_tokens, prefilled.owed - 1)
            return
        request.decode_start = self._timeline.now
        has_token = not math.isnan(request.first_token)
        num_tokens = request.num_output_tokens - has_token
        self._batch.join(request, request.num_prompt_tokens, num_tokens, has_token=has_token)
        if not has_token:
            self._fresh.append(request)

    def _stepped(self, step: tuple[float, int]) -> None:
        seconds, life = step
        if life != self._life:
            return
        now = self._timeline.now
        self.busy.add(now - seconds, now, seconds)
        self.held.add(now - seconds, now, seconds * self._batch.context)
        self._gaps.add(seconds, self._batch.num_gaps(1))
        for request in self._fresh:
            request.first_token = self._timeline.now
        self._fresh.clear()
        for request in self._batch.advance(1, seconds):
            self._ended(request)
        self._start_prompt()
        self._step()

    def _ended(self, request: SimulatedRequest) -> None:
        request.decode_end = self._timeline.now
        self._callbacks.on_ended(request)


def _held(request: SimulatedRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens

"""Simulated engine that prefills and decodes at the same time on shares of one device."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import OVERALLOCATED, Partition, PartitionState, SharingPolicy, StepLoad, next_sharing
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedEngine
from prfaas.sim.model.request import SimulatedRequest
from prfaas.solve.files.profile_file import read_colocation, read_profile

# Pairs of (share of the compute units, speed relative to the whole device alone), ascending.
SpeedPoints = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SharingSpeeds:
    """Speeds of decode and prefill on one device, relative to having the device alone.

    Between points the speed is linear, from 0 at no share; beyond the last point it is constant.
    """

    decode: SpeedPoints
    prefill: SpeedPoints
    overallocated_decode: float
    overallocated_prefill: float

    @property
    def best_decode_speed(self) -> float:
        """Return the greatest speed of decode while a prefill runs."""
        return max(speed for _, speed in self.decode)

    @property
    def overlap(self) -> float:
        """Return the gain by sharing in instances: the best a + b − 1 of a split or of over-allocation."""
        splits = (Partition(share, 1.0 - share) for share, _ in self.decode)
        return max(self.decode_speed(split) + self.prefill_speed(split) for split in (*splits, OVERALLOCATED)) - 1.0

    def decode_speed(self, partition: Partition) -> float:
        """Return the speed of decode under a partition; prefill is busy if it has a share."""
        if not partition.prefill_share:
            return 1.0
        return (
            self.overallocated_decode if partition == OVERALLOCATED else _speed_at(self.decode, partition.decode_share)
        )

    def prefill_speed(self, partition: Partition) -> float:
        """Return the speed of prefill under a partition; decode is busy if it has a share."""
        if not partition.decode_share:
            return 1.0
        return (
            self.overallocated_prefill
            if partition == OVERALLOCATED
            else _speed_at(self.prefill, partition.prefill_share)
        )


def _speed_at(points: SpeedPoints, share: float) -> float:
    low, low_speed = 0.0, 0.0
    for high, high_speed in points:
        if share < high:
            return low_speed + (high_speed - low_speed) * (share - low) / (high - low)
        low, low_speed = high, high_speed
    return low_speed


def modelled_speeds(
    decode_peak_share: float = 0.45,
    decode_memory_ratio: float = 0.035,
    prefill_memory_ratio: float = 0.02,
    overallocated_prefill: float = 0.75,
    overallocated_decode: float = 0.6,
) -> SharingSpeeds:
    """Return RAPID-Serve's speeds.

    Decode peaks at `decode_peak_share` of the compute units; prefill is proportional to its share. Sharing memory
    bandwidth costs decode and prefill their memory ratios.
    """
    return SharingSpeeds(
        ((decode_peak_share, 1.0 - decode_memory_ratio),),
        ((1.0, 1.0 - prefill_memory_ratio),),
        overallocated_decode,
        overallocated_prefill,
    )


def read_sharing(file: Path) -> SharingSpeeds:
    """Return the speeds that `prfaas-colocate profile` measured.

    Raises:
        ConfigError: the file cannot be read, or lacks decode alone or over-allocated prefill.
    """
    (shared, table), profile = read_colocation(file), read_profile(file)
    if profile.decode is None:
        raise ConfigError(f"{file}: decode: no points of decode alone")
    alone = [profile.decode.step_seconds(batch, shared.context) for batch in table.batches]
    columns = zip(*table.seconds, strict=True)
    # Speeds of each prompt length by share.
    prefill: dict[float, list[float]] = {}
    for point in shared.prefill:
        prefill.setdefault(point.share, []).append(profile.prefill.seconds(point.tokens) / point.seconds)
    if 1.0 not in prefill:
        raise ConfigError(f"{file}: colocation: prefill: no point with a share of 1, which is over-allocation")
    prefill_speeds = {share: min(1.0, median(speeds)) for share, speeds in prefill.items()}
    return SharingSpeeds(
        tuple((share, _median_speed(alone, column)) for share, column in zip(table.shares, columns, strict=True)),
        tuple(sorted((share, speed) for share, speed in prefill_speeds.items() if share < 1.0)),
        _median_speed(alone, table.overallocated_seconds),
        prefill_speeds[1.0],
    )


def _median_speed(alone: Sequence[float], shared: Sequence[float]) -> float:
    """Return the median speed over the batches, at most 1, since only noise exceeds it."""
    return min(1.0, median(before / after for before, after in zip(alone, shared, strict=True)))


def share_table(spec: InstanceSpec, speeds: SharingSpeeds, *, context_tokens: float) -> ShareTable:
    """Return the table that the colocation policy learns offline: steps at `context_tokens`, by batch and share."""
    assert spec.decode is not None, "a shared instance decodes"
    shares = tuple(step / 20 for step in range(2, 19))
    batches = tuple(batch for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if batch <= spec.max_batch)
    alone = [spec.decode.step_seconds(batch, context_tokens) for batch in batches]
    by_share = [speeds.decode_speed(Partition(share, 1 - share)) for share in shares]
    return ShareTable(
        shares,
        batches,
        tuple(tuple(seconds / speed for speed in by_share) for seconds in alone),
        tuple(seconds / speeds.decode_speed(OVERALLOCATED) for seconds in alone),
    )


@dataclass(frozen=True)
class SharingSpec:
    """Sharing of a device: the policy, the speeds, and the context length of the policy's offline profile."""

    policy: SharingPolicy
    speeds: SharingSpeeds = field(default_factory=modelled_speeds)
    context_tokens: float = 8192.0


class SharedInstance(SimulatedEngine):
    """Engine that computes one whole prompt after the other while the batch decodes.

    `scheduler.colocation.next_sharing` chooses the partition before each decode step, or when a prompt starts while no
    request decodes. Each decode step is an event, since the next may have another partition.
    """

    def __init__(self, timeline: Timeline, spec: InstanceSpec, callbacks: Callbacks, *, sharing: SharingSpec) -> None:
        super().__init__(timeline, spec, callbacks)
        self._speeds, self._policy = sharing.speeds, sharing.policy
        self._table = share_table(spec, sharing.speeds, context_tokens=sharing.context_tokens)
        # Requests with KV that join the batch at the next step.
        self._joining: deque[Prefill] = deque()
        self._current: Prefill | None = None
        # Rest of the current prompt in seconds of the whole device.
        self._work_left = 0.0
        self._prefill_speed = 1.0
        self._moved_at = 0.0
        self._sharing = PartitionState()
        self._is_stepping = False
        # Counts stops: a step that began before the last stop has no end.
        self._num_stops = 0

    def decode(self, request: SimulatedRequest) -> None:
        if self._is_stopped:
            return
        self._joining.append(Prefill(request, 0, request.num_prompt_tokens, stays=True))
        if not self._is_stepping:
            self._step()

    def stop(self) -> None:
        super().stop()
        self._is_stepping, self._current = False, None
        self._num_stops += 1
        self._joining.clear()

    # Prefill side

    def _start_queued(self) -> None:
        if self._current is not None or not self._queue or not self._has_room(self._queue[0], self._joining):
            return
        self._current = self._queue.popleft()
        self._moved_at = self._timeline.now
        self._work_left = self._spec.prefill.seconds(self._current.new, self._current.cached)
        if not self._is_stepping:
            self._share()
        if not self._current.owed:
            self._current.request.prefill_start = self._timeline.now
            self._callbacks.on_last_chunk(self._current, self._work_left / max(self._prefill_speed, 1e-9))
        self._await_prompt()

    def _move(self) -> None:
        """Advance the current prompt to now."""
        before, self._moved_at = self._moved_at, self._timeline.now
        passed = self._moved_at - before
        if self._current is not None:
            self._work_left -= passed * self._prefill_speed
            if not self._is_stepping:
                self.busy.add(before, self._moved_at, passed)

    def _await_prompt(self) -> None:
        self._version += 1
        if self._current is not None and self._prefill_speed:
            seconds = max(self._work_left, 0.0) / self._prefill_speed
            self._timeline.at(self._timeline.now + seconds, self._finish_prompt, self._version)

    def _finish_prompt(self, version: int) -> None:
        # A new version means that the speed of the prompt has changed.
        if version != self._version:
            return
        self._move()
        prefill, self._current = self._current, None
        assert prefill is not None, "the finish is planned only for a current prompt"
        request = prefill.request
        if prefill.owed:
            self._note_stall(prefill)
        else:
            request.prefill_end = request.transfer_end = request.first_token = self._timeline.now
        if prefill.stays and (prefill.owed or request.num_output_tokens) > 1:
            self._joining.append(prefill)
        elif prefill.stays:
            self._ended(request)
        if not prefill.owed:
            self._callbacks.on_prefilled(prefill)
        self._start_queued()
        if not self._is_stepping:
            self._step()

    # Decode side

    def _share(self) -> None:
        """Choose the partition and continue the prompt at its new speed."""
        self._move()
        load = StepLoad(self._batch.num, self._current is not None)
        self._sharing = next_sharing(self._sharing, load, self._table, policy=self._policy)
        self._prefill_speed = self._speeds.prefill_speed(self._sharing.partition)
        self._await_prompt()

    def _step(self) -> None:
        current_tokens = self._current.num_tokens if self._current else 0
        self._make_room(sum(prompt.num_tokens for prompt in self._joining) + current_tokens)
        while self._joining and self._batch.num < self._spec.max_batch:
            self._join(self._joining.popleft())
        self._is_stepping = bool(self._batch.num)
        self._share()
        if self._is_stepping:
            seconds = self._batch.seconds(1) / self._speeds.decode_speed(self._sharing.partition)
            self._timeline.at(self._timeline.now + seconds, self._end_step, (seconds, self._num_stops))

    def _join(self, prefilled: Prefill) -> None:
        """Add a request to the batch. If its KV came from another node, its last prompt token is computed again."""
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

    def _end_step(self, step: tuple[float, int]) -> None:
        seconds, num_stops = step
        if num_stops != self._num_stops:
            return
        now = self._timeline.now
        self.busy.add(now - seconds, now, seconds)
        for request in self._fresh:
            request.first_token = now
        self._fresh.clear()
        for request in self._batch.advance(1, seconds):
            self._ended(request)
        self._start_queued()
        self._step()

"""Simulated engine that prefills and decodes at the same time on shares of one device."""

import math
from collections import deque
from dataclasses import dataclass, field

from prfaas.model.cost.colocation import OVERALLOCATED, Partition, ShareTable, SharingSpeeds
from prfaas.scheduler.colocation import PartitionState, SharingPolicy, StepLoad, next_sharing, pause_seconds
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedEngine
from prfaas.sim.model.request import SimulatedRequest


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
        ((decode_peak_share, ((1.0, 1.0 - decode_memory_ratio),)),),
        ((1.0, 1.0 - prefill_memory_ratio),),
        ((1.0, overallocated_decode),),
        overallocated_prefill,
        tuple(step / 20 for step in range(2, 19)),
    )


def share_table(spec: InstanceSpec, speeds: SharingSpeeds, *, context_tokens: float) -> ShareTable:
    """Return the table that the colocation policy learns offline: steps at `context_tokens`, by batch and share."""
    assert spec.decode is not None, "a shared instance decodes"
    batches = tuple(batch for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if batch <= spec.max_batch)
    decode = spec.decode

    def step_seconds(batch: int, partition: Partition) -> float:
        speed = speeds.decode_speed(partition, batch)
        return decode.step_seconds(batch, context_tokens) / speed if speed else math.inf

    splits = [Partition(share, 1 - share) for share in speeds.shares]
    return ShareTable(
        speeds.shares,
        batches,
        tuple(tuple(step_seconds(batch, split) for split in splits) for batch in batches),
        tuple(step_seconds(batch, OVERALLOCATED) for batch in batches),
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
    request decodes. Each decode step is an event, since the next may have another partition. Before it decode may pause.
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
        # End of the last decode step, or the moment at which decode began again.
        self._gap_start = 0.0
        self._sharing = PartitionState()
        # A decode step runs, or waits for its pause to end.
        self._is_stepping = self._is_paused = False
        # Id of the latest pause, step or stop: the end of an earlier one is void.
        self._event_id = 0

    def decode(self, request: SimulatedRequest) -> None:
        if self._is_stopped:
            return
        self._joining.append(Prefill(request, 0, request.num_prompt_tokens, stays=True))
        if not self._is_stepping:
            self._step()

    def stop(self) -> None:
        super().stop()
        self._is_stepping, self._is_paused, self._current = False, False, None
        self._event_id += 1
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
            if not self._is_stepping or self._is_paused:
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
        if self._is_paused:
            self._begin_step(self._event_id)
        elif not self._is_stepping:
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
        is_urgent = bool(self._joining)
        while self._joining and self._batch.num < self._spec.max_batch:
            self._join(self._joining.popleft())
        self._is_stepping = bool(self._batch.num)
        self._share()
        if not self._is_stepping:
            return
        self._event_id += 1
        self._gap_start, partition = self._timeline.now, self._sharing.partition
        seconds = self._step_seconds()
        pause = pause_seconds(partition, seconds, policy=self._policy)
        if is_urgent or not pause or self._current is None:
            self._begin_step(self._event_id)
            return
        self._is_paused, self._prefill_speed = True, 1.0
        self._await_prompt()
        self._timeline.at(self._timeline.now + pause, self._begin_step, self._event_id)

    def _begin_step(self, event_id: int) -> None:
        """Begin a decode step after its pause, which also ends with a prompt."""
        if event_id != self._event_id:
            return
        if self._is_paused:
            self._move()
            self._is_paused, self._prefill_speed = False, self._speeds.prefill_speed(self._sharing.partition)
            self._await_prompt()
        self._event_id += 1
        seconds = self._step_seconds()
        self._timeline.at(self._timeline.now + seconds, self._end_step, (seconds, self._event_id))

    def _step_seconds(self) -> float:
        return self._batch.seconds(1) / self._speeds.decode_speed(self._sharing.partition, self._batch.num)

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
        seconds, event_id = step
        if event_id != self._event_id:
            return
        now = self._timeline.now
        self.busy.add(now - seconds, now, seconds)
        for request in self._fresh:
            request.first_token = now
        self._fresh.clear()
        for request in self._batch.advance(1, now - self._gap_start):
            self._ended(request)
        self._start_queued()
        self._step()

"""Adaptive resource manager: chooses the cores of both workers before each decode step."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.colocate.cores import Cores, split
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import (
    OVERALLOCATED,
    Partition,
    PartitionState,
    SharingPolicy,
    StepLoad,
    next_sharing,
)

# Decode waits between steps for this part of its SLO at most: the rest is for steps that take longer than the last ones.
_PACE = 0.8
_MIN_PAUSE_SECONDS = 0.005  # A shorter one costs more than it gains.
# Without a profile nothing is known about shares. Two teams on the same cores wait for each other, so each gets half.
_EVEN = ShareTable((0.5,), (1,), ((0.0,),), (float("inf"),))


@dataclass(frozen=True)
class PartitionSettings:
    """Settings of the manager. `decode_share` above 0 pins the partition; `table` is measured by `prfaas-colocate profile`."""

    itl_slo_seconds: float = 0.05
    decode_share: float = 0.0
    table: ShareTable | None = None


def _pinned(decode_share: float) -> Partition | None:
    if decode_share == 1.0:
        return OVERALLOCATED
    return Partition(decode_share, 1 - decode_share) if decode_share else None


class PartitionManager:
    """Cores of decode and prefill in the present step."""

    def __init__(self, settings: PartitionSettings, cores: Cores) -> None:
        self._cores = cores
        self._pinned = _pinned(settings.decode_share)
        self._table = settings.table or _EVEN
        self._policy = SharingPolicy(settings.itl_slo_seconds)
        self._state = PartitionState(self._pinned or OVERALLOCATED)
        self._paced_seconds = _PACE * settings.itl_slo_seconds if settings.table and not self._pinned else 0.0

    def next(self, load: StepLoad) -> tuple[Cores, Cores]:
        """Return the cores of decode and of prefill for the next step."""
        if self._pinned is None:
            self._state = next_sharing(self._state, load, self._table, policy=self._policy)
        return split(self._state.partition, self._cores)

    def pause_seconds(self, step_seconds: float) -> float:
        """Return how long decode may wait before a step of `step_seconds`. Prefill has all cores meanwhile.

        Few cores make coarse shares. A pause gives prefill what decode's least share leaves of the SLO.
        """
        pause = self._paced_seconds - step_seconds
        return pause if self._state.partition.is_split and pause >= _MIN_PAUSE_SECONDS else 0.0

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

    @property
    def partition(self) -> Partition:
        return self._state.partition

    def next(self, load: StepLoad) -> tuple[Cores, Cores]:
        """Return the cores of decode and of prefill for the next step."""
        if self._pinned is None:
            self._state = next_sharing(self._state, load, self._table, policy=self._policy)
        return split(self._state.partition, self._cores)

"""Adaptive resource manager: chooses the cores of both workers before each decode step."""

from dataclasses import dataclass

from prfaas.colocate.cores import Cores, split
from prfaas.model.cost.colocation import OVERALLOCATED, Partition, ShareTable
from prfaas.scheduler.colocation import PartitionState, SharingPolicy, StepLoad, next_sharing, pause_seconds

# Without a profile nothing is known about shares. Two teams on the same cores wait for each other, so each gets half.
_EVEN = ShareTable((0.5,), (1,), ((0.0,),), (float("inf"),))


@dataclass(frozen=True)
class PartitionSettings:
    """Settings of the manager.

    Attributes:
        itl_slo_seconds: Longest decode step.
        decode_share: Pinned share of decode; 0 adapts.
        table: Measurements of `prfaas-colocate profile`.
        decode_spreads: All cores make the steps of decode alone faster than its share of them does.
    """

    itl_slo_seconds: float = 0.05
    decode_share: float = 0.0
    table: ShareTable | None = None
    decode_spreads: bool = True


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
        is_paced = settings.table is not None and not self._pinned
        self._policy = SharingPolicy(settings.itl_slo_seconds, is_paced=is_paced)
        self._state = PartitionState(self._pinned or OVERALLOCATED)
        self._decode_spreads = settings.decode_spreads
        self._prefill_busy = False

    def next(self, load: StepLoad) -> tuple[Cores, Cores]:
        """Return the cores of decode and of prefill for the next step."""
        self._prefill_busy = load.prefill_busy
        if load.decode_batch and not self._decode_spreads:
            load = StepLoad(load.decode_batch, prefill_busy=True)
        if self._pinned is None:
            self._state = next_sharing(self._state, load, self._table, policy=self._policy)
        return split(self._state.partition, self._cores)

    def pause_seconds(self, step_seconds: float, waited_seconds: float) -> float:
        """Return how long decode may still wait before a step of `step_seconds`. Prefill has all cores meanwhile."""
        if not self._prefill_busy:
            return 0.0
        return pause_seconds(self._state.partition, step_seconds, waited_seconds, policy=self._policy)

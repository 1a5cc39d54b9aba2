"""Adaptive resource manager: chooses the cores of both workers before each decode step."""

from dataclasses import dataclass

from prfaas.colocate.cores import Cores, split
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import OVERALLOCATED, Partition, PartitionState, SharingPolicy, StepLoad, next_sharing

# Decode waits between steps for this part of its SLO at most: the rest is for steps that take longer than the last ones.
_PACE = 0.8
_MIN_PAUSE_SECONDS = 0.003  # A shorter one costs more than it gains.
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
        self._policy = SharingPolicy(settings.itl_slo_seconds)
        self._state = PartitionState(self._pinned or OVERALLOCATED)
        self._paced_seconds = _PACE * settings.itl_slo_seconds if settings.table and not self._pinned else 0.0
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
        """Return how long decode may still wait before a step of `step_seconds`. Prefill has all cores meanwhile.

        Few cores make coarse shares. A pause gives prefill what decode's least share leaves of the SLO.
        """
        pause = self._paced_seconds - step_seconds - waited_seconds
        is_shared = self._prefill_busy and self._state.partition.is_split
        return pause if is_shared and pause >= _MIN_PAUSE_SECONDS else 0.0

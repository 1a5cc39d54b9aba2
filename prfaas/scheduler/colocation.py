"""Division of one GPU between prefill and decode: RAPID-Serve's adaptive resource manager as a pure function.

If the profile says that decode meets its ITL SLO while both sides compete, both sides get the whole GPU (over-allocation).
Otherwise decode gets the smallest share that meets the SLO, and prefill gets the rest (RAPID-Serve, section 4.5.3).
Decode gets a larger share at once. It gets a smaller one after `dwell_steps` steps in which that share would do.
"""

from dataclasses import dataclass

from prfaas.model.cost.colocation import OVERALLOCATED, Partition, ShareTable

# Decode waits between steps for this part of its SLO at most: the rest is for steps that take longer than the last ones.
_PACE = 0.8
_MIN_PAUSE_SECONDS = 0.003  # A shorter one costs more than it gains.


@dataclass(frozen=True)
class StepLoad:
    """Work of both sides in the next step."""

    decode_batch: int
    prefill_busy: bool


@dataclass(frozen=True)
class SharingPolicy:
    """Bound of one decode step, and the number of steps that must allow a smaller decode share before it is used.

    If `is_paced`, decode waits between steps while it is faster than its bound.
    """

    itl_slo_seconds: float
    dwell_steps: int = 16
    is_paced: bool = False


@dataclass(frozen=True)
class PartitionState:
    """Partition in force, and the number of steps in which a smaller decode share would have sufficed."""

    partition: Partition = OVERALLOCATED
    relaxed_steps: int = 0


def target_partition(load: StepLoad, profile: ShareTable, itl_slo_seconds: float) -> Partition:
    """Return the partition for a constant load. If no share meets the SLO, return the fastest one."""
    if load.decode_batch == 0:
        return Partition(0.0, 1.0) if load.prefill_busy else OVERALLOCATED
    if not load.prefill_busy:
        return Partition(1.0, 0.0)
    per_share, overallocated = profile.at(load.decode_batch)
    if overallocated <= itl_slo_seconds:
        return OVERALLOCATED
    for share, seconds in zip(profile.shares, per_share, strict=True):
        if seconds <= itl_slo_seconds:
            return Partition(share, 1 - share)
    fastest = profile.shares[per_share.index(min(per_share))]
    return Partition(fastest, 1 - fastest)


def next_sharing(
    sharing: PartitionState, load: StepLoad, profile: ShareTable, *, policy: SharingPolicy
) -> PartitionState:
    """Return the partition for the next step. Call once between two steps."""
    wanted = target_partition(load, profile, policy.itl_slo_seconds)
    held = sharing.partition
    if wanted == held or not _relaxes(held, wanted) or not _meets(held, load, profile, policy.itl_slo_seconds):
        return PartitionState(wanted)
    if sharing.relaxed_steps + 1 >= policy.dwell_steps:
        return PartitionState(wanted)
    return PartitionState(held, sharing.relaxed_steps + 1)


def pause_seconds(
    partition: Partition, step_seconds: float, waited_seconds: float = 0.0, *, policy: SharingPolicy
) -> float:
    """Return how long decode may still wait before a step beside a prefill, which has the whole device meanwhile.

    A device with few shares gives prefill what decode's least share leaves of the SLO.
    """
    pause = _PACE * policy.itl_slo_seconds - step_seconds - waited_seconds
    return pause if policy.is_paced and partition.is_split and pause >= _MIN_PAUSE_SECONDS else 0.0


def _relaxes(held: Partition, wanted: Partition) -> bool:
    """Return whether the change gives decode a smaller share of its own, or none."""
    return held.is_split and (wanted == OVERALLOCATED or (wanted.is_split and wanted.decode_share < held.decode_share))


def _meets(held: Partition, load: StepLoad, profile: ShareTable, itl_slo_seconds: float) -> bool:
    per_share, _ = profile.at(load.decode_batch)
    return held.decode_share in profile.shares and per_share[profile.shares.index(held.decode_share)] <= itl_slo_seconds

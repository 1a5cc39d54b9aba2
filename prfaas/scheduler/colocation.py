"""How one GPU is shared between prefill and decode: RAPID-Serve's adaptive resource manager as a pure function.

While the profile says that decode meets its ITL SLO although both sides compete for everything, both get everything
(over-allocation: the hardware fills every gap). Else decode gets the least share that meets it and prefill the rest
(RAPID-Serve, section 4.5.3). More for decode comes at once; less only after `dwell_steps` steps in which less would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prfaas.model.cost.colocation import ShareTable

PartitionReason = Literal[
    "both_idle", "prefill_idle", "decode_idle", "overallocated", "least_share", "slo_unreachable", "held"
]


@dataclass(frozen=True)
class StepLoad:
    """What the two sides have to do in the next step."""

    decode_batch: int
    prefill_busy: bool


@dataclass(frozen=True)
class Partition:
    """The share of the compute units that each side may use; both 1.0 is over-allocation, 0.0 an idle side."""

    decode_share: float
    prefill_share: float

    @property
    def is_split(self) -> bool:
        return 0 < self.decode_share < 1 and 0 < self.prefill_share < 1


OVERALLOCATED = Partition(1.0, 1.0)


@dataclass(frozen=True)
class SharingPolicy:
    """`itl_slo_seconds` bounds one decode step; a smaller decode share is taken after `dwell_steps` steps that allow it."""

    itl_slo_seconds: float
    dwell_steps: int = 16


@dataclass(frozen=True)
class Sharing:
    """The partition in force, why, and for how many steps a smaller decode share would have done."""

    partition: Partition = OVERALLOCATED
    reason: PartitionReason = "both_idle"
    relaxed_steps: int = 0


def target_partition(load: StepLoad, profile: ShareTable, itl_slo_seconds: float) -> tuple[Partition, PartitionReason]:
    """Return the partition for a load that stays as it is; when no share meets the SLO, the fastest one."""
    if load.decode_batch == 0:
        return (Partition(0.0, 1.0), "decode_idle") if load.prefill_busy else (OVERALLOCATED, "both_idle")
    if not load.prefill_busy:
        return Partition(1.0, 0.0), "prefill_idle"
    per_share, overallocated = profile.at(load.decode_batch)
    if overallocated <= itl_slo_seconds:
        return OVERALLOCATED, "overallocated"
    for share, seconds in zip(profile.shares, per_share, strict=True):
        if seconds <= itl_slo_seconds:
            return Partition(share, 1 - share), "least_share"
    fastest = profile.shares[per_share.index(min(per_share))]
    return Partition(fastest, 1 - fastest), "slo_unreachable"


def next_sharing(sharing: Sharing, load: StepLoad, profile: ShareTable, *, policy: SharingPolicy) -> Sharing:
    """Return the partition for the next step; called between steps and nowhere else."""
    wanted, reason = target_partition(load, profile, policy.itl_slo_seconds)
    held = sharing.partition
    if wanted == held or not _relaxes(held, wanted) or not _meets(held, load, profile, policy.itl_slo_seconds):
        return Sharing(wanted, reason)
    if sharing.relaxed_steps + 1 >= policy.dwell_steps:
        return Sharing(wanted, reason)
    return Sharing(held, "held", sharing.relaxed_steps + 1)


def _relaxes(held: Partition, wanted: Partition) -> bool:
    """Return whether the change takes protection from decode: a smaller share of its own, or none of its own."""
    return held.is_split and (wanted == OVERALLOCATED or (wanted.is_split and wanted.decode_share < held.decode_share))


def _meets(held: Partition, load: StepLoad, profile: ShareTable, itl_slo_seconds: float) -> bool:
    per_share, _ = profile.at(load.decode_batch)
    return held.decode_share in profile.shares and per_share[profile.shares.index(held.decode_share)] <= itl_slo_seconds

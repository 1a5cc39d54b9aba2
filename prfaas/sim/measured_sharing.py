"""How fast two sides share a device, by what `prfaas-colocate profile` measured there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from prfaas.errors import ConfigError
from prfaas.scheduler.colocation import OVERALLOCATED, Partition
from prfaas.solve.profile_file import read_colocation, read_profile

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
        return max(self.decode_speed(its) + self.prefill_speed(its) for its in (*splits, OVERALLOCATED)) - 1.0

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
        decode=_points(zip(its.decode.shares, (_speed(batches, one) for one in columns), strict=True)),
        prefill=_points((share, min(1.0, median(speeds))) for share, speeds in prefill.items() if share < 1.0),
        overallocated_decode=_speed(batches, its.decode.overallocated_seconds),
        overallocated_prefill=min(1.0, median(prefill[1.0])),
    )


def _speed(alone: Sequence[float], shared: Sequence[float]) -> float:
    """The median over the batches; never above 1, which only noise is."""
    return min(1.0, median(one / other for one, other in zip(alone, shared, strict=True)))


def _points(pairs: Iterable[tuple[float, float]]) -> Points:
    return tuple(sorted(pairs))


def _at(points: Points, share: float) -> float:
    """On a line from nothing at no share; as at the greatest measured share beyond it."""
    shares, speeds = zip((0.0, 0.0), *points, strict=True)
    return float(np.interp(share, shares, speeds))

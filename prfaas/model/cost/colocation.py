"""Measured speeds of a device that prefills and decodes at the same time."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

# Pairs of numbers that rise by the first one, with straight lines between them.
Line = tuple[tuple[float, float], ...]


def at(line: Line, x: float) -> float:
    """Return y of a line, constant beyond its ends."""
    if x < line[0][0]:
        return line[0][1]
    for (low, y), (high, high_y) in pairwise(line):
        if x < high:
            return y + (high_y - y) * (x - low) / (high - low)
    return line[-1][1]


def frontier_through(points: Iterable[tuple[float, float]] = ()) -> Line:
    """Return the corners (prefill speed, decode speed) of the greatest speeds of a shared device.

    Speeds are relative to each phase alone. The device may alternate between the points, and each phase alone, so the
    line is concave.
    """
    corners: list[tuple[float, float]] = []
    for a, b in sorted({(0.0, 1.0), (1.0, 0.0), *points}):
        while len(corners) > 1:
            (c, d), (e, f) = corners[-2:]
            if (e - c) * (b - d) < (f - d) * (a - c):
                break
            corners.pop()
        corners.append((a, b))
    return tuple(corners)


@dataclass(frozen=True)
class Partition:
    """Share of the compute units that each side may use. Both 1.0 is over-allocation, 0.0 is an idle side."""

    decode_share: float
    prefill_share: float

    @property
    def is_split(self) -> bool:
        return 0 < self.decode_share < 1 and 0 < self.prefill_share < 1


OVERALLOCATED = Partition(1.0, 1.0)


@dataclass(frozen=True)
class SharingSpeeds:
    """Speeds of decode and prefill by their share of one device, relative to the whole device.

    `shares` lists the shares that decode can have. `overallocated_decode` is 0 if the profile rules over-allocation out.
    """

    decode: Line
    prefill: Line
    overallocated_decode: float
    overallocated_prefill: float
    shares: tuple[float, ...]

    @property
    def frontier(self) -> Line:
        """Return the frontier through every split and over-allocation."""
        partitions = [*(Partition(share, 1.0 - share) for share in self.shares), OVERALLOCATED]
        return frontier_through((self.prefill_speed(each), self.decode_speed(each)) for each in partitions)

    @property
    def best_decode_speed(self) -> float:
        """Return the greatest speed of decode while a prefill runs."""
        return max(speed for _, speed in self.decode)

    def decode_speed(self, partition: Partition) -> float:
        """Return the speed of decode under a partition; prefill is busy if it has a share."""
        if not partition.prefill_share:
            return 1.0
        shared = at(((0.0, 0.0), *self.decode), partition.decode_share)
        return self.overallocated_decode if partition == OVERALLOCATED else shared

    def prefill_speed(self, partition: Partition) -> float:
        """Return the speed of prefill under a partition; decode is busy if it has a share."""
        if not partition.decode_share:
            return 1.0
        shared = at(((0.0, 0.0), *self.prefill), partition.prefill_share)
        return self.overallocated_prefill if partition == OVERALLOCATED else shared


@dataclass(frozen=True)
class ShareTable:
    """Seconds of a decode step, measured while a prefill runs on the rest of the device.

    `seconds[i][j]` is a step of `batches[i]` requests on `shares[j]` of the compute units.
    `overallocated_seconds[i]` is the same step when both phases may use all units.
    `shares`, between 0 and 1, and `batches` are in ascending order.

    Raises:
        ValueError: the table is empty, or a share is not between 0 and 1.
    """

    shares: tuple[float, ...]
    batches: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    overallocated_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not self.batches:
            raise ValueError("a table of shares needs at least one share and one batch")
        if not 0 < self.shares[0] <= self.shares[-1] < 1:
            raise ValueError(f"shares must be within (0, 1), got {self.shares}")

    def at(self, batch: int) -> tuple[tuple[float, ...], float]:
        """Return the step seconds for each share, and those of over-allocation, of the next larger measured batch.

        Beyond the largest measured batch, seconds grow in proportion to the batch. That overstates a step that mostly
        reads weights.
        """
        row = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        growth = max(1.0, batch / self.batches[row])
        return tuple(value * growth for value in self.seconds[row]), self.overallocated_seconds[row] * growth

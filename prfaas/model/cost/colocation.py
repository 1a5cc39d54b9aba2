"""Measured speeds of a device that prefills and decodes at the same time."""

from __future__ import annotations

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


def concave_line(points: Iterable[tuple[float, float]]) -> Line:
    """Return the corners of the lowest concave line above all points, in the order of x."""
    corners: list[tuple[float, float]] = []
    for a, b in sorted(set(points), key=lambda point: (point[0], -point[1])):
        while len(corners) > 1:
            (c, d), (e, f) = corners[-2:]
            if (e - c) * (b - d) < (f - d) * (a - c):
                break
            corners.pop()
        corners.append((a, b))
    return tuple(corners)


@dataclass(frozen=True)
class Frontier:
    """Speeds that a device reaches when it prefills and decodes at once, relative to each phase alone.

    Each point is a prefill speed, and the decode speeds beside it as a line over the decode batch.
    """

    points: tuple[tuple[float, Line], ...] = ()

    @classmethod
    def through(cls, *points: tuple[float, float]) -> Frontier:
        """Return the frontier through points (prefill speed, decode speed) that hold for every batch."""
        return cls(tuple((prefill, ((1.0, decode),)) for prefill, decode in points))

    def at(self, batch: float) -> Line:
        """Return the corners (prefill speed, decode speed) for a decode batch.

        The device may alternate between the points, and each phase alone, so the line is concave.
        """
        return concave_line(
            [(0.0, 1.0), (1.0, 0.0), *((prefill, at(decode, batch)) for prefill, decode in self.points)]
        )


ALTERNATING = Frontier()


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

    Decode speeds are lines over the decode batch. `shares` lists the shares that decode can have. `overallocated_decode`
    is 0 if the profile rules over-allocation out.
    """

    decode: tuple[tuple[float, Line], ...]
    prefill: Line
    overallocated_decode: Line
    overallocated_prefill: float
    shares: tuple[float, ...]

    @property
    def frontier(self) -> Frontier:
        """Return the frontier through every split and over-allocation."""
        batches = sorted({batch for _, line in self.decode for batch, _ in line})
        partitions = [*(Partition(share, 1.0 - share) for share in self.shares), OVERALLOCATED]
        speeds = [
            (self.prefill_speed(each), [self.decode_speed(each, batch) for batch in batches]) for each in partitions
        ]
        return Frontier(tuple((prefill, tuple(zip(batches, decode, strict=True))) for prefill, decode in speeds))

    @property
    def best_decode_speed(self) -> float:
        """Return the greatest decode speed beside a prefill, at the largest measured batch."""
        return max(line[-1][1] for _, line in self.decode)

    def decode_speed(self, partition: Partition, batch: float) -> float:
        """Return the speed of a decode batch under a partition; prefill is busy if it has a share."""
        if not partition.prefill_share:
            return 1.0
        if partition == OVERALLOCATED:
            return at(self.overallocated_decode, batch)
        by_share = ((0.0, 0.0), *((share, at(line, batch)) for share, line in self.decode))
        return at(by_share, partition.decode_share)

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

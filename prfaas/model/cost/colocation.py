"""Decode steps of a device that prefills at the same time, by decode's share of the compute."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class ShareTable:
    """Decode step seconds, measured offline with a prefill running on the rest of the device.

    `seconds[i][j]` is a step of `batches[i]` requests on `shares[j]` of the compute units.
    `overallocated_seconds[i]` is the same step when both sides may use all of them.
    `shares` (in (0, 1)) and `batches` ascend.

    Raises:
        ValueError: the table is empty, unsorted or of unequal width.
    """

    shares: tuple[float, ...]
    batches: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    overallocated_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not self.batches:
            raise ValueError("a table of shares needs at least one share and one batch")
        if list(self.shares) != sorted(set(self.shares)) or not 0 < self.shares[0] <= self.shares[-1] < 1:
            raise ValueError(f"shares must ascend within (0, 1), got {self.shares}")
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches must ascend from 1, got {self.batches}")
        if {len(row) for row in self.seconds} != {len(self.shares)} or len(self.seconds) != len(self.batches):
            raise ValueError("seconds must hold one row per batch, one figure per share")
        if len(self.overallocated_seconds) != len(self.batches):
            raise ValueError("overallocated_seconds must hold one figure per batch")

    def at(self, batch: int) -> tuple[tuple[float, ...], float]:
        """Return step seconds per share, and over-allocated, of the next larger measured batch.

        Beyond the largest batch they grow in proportion to it, which overstates a step that is bound by weights.
        """
        row = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        growth = max(1.0, batch / self.batches[row])
        return tuple(value * growth for value in self.seconds[row]), self.overallocated_seconds[row] * growth

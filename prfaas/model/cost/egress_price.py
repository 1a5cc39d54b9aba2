"""Price of bytes that leave a cluster, by time of day."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

_DAY_HOURS = 24.0
_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class PricePeriod:
    """Price per GB between two hours of the day; a period may pass midnight."""

    start_hour: float
    end_hour: float
    per_gb: float

    @property
    def num_hours(self) -> float:
        """Return the length of the period; equal hours are a whole day."""
        return (self.end_hour - self.start_hour) % _DAY_HOURS or _DAY_HOURS

    def includes(self, hour: float) -> bool:
        """Return whether an hour of the day lies in the period."""
        return (hour - self.start_hour) % _DAY_HOURS < self.num_hours


@dataclass(frozen=True)
class EgressPrice:
    """Price per GB, and other prices in periods of the day. Where periods overlap the first one counts."""

    per_gb: float
    periods: tuple[PricePeriod, ...] = ()

    def per_hour(self, bytes_per_second: float, *, hour: float | None = None) -> float:
        """Return what a steady rate costs in an hour, on average over the day or at one hour of it."""
        price = self._mean if hour is None else self.at(hour)
        return bytes_per_second * 3600.0 / _BYTES_PER_GB * price

    def at(self, hour: float) -> float:
        """Return the price per GB at an hour of the day."""
        return next((period.per_gb for period in self.periods if period.includes(hour)), self.per_gb)

    @property
    def change_hours(self) -> set[float]:
        """Return the hours of the day at which the price may change; midnight is one."""
        edges = {0.0}
        for period in self.periods:
            edges |= {period.start_hour % _DAY_HOURS, period.end_hour % _DAY_HOURS}
        return edges

    @property
    def _mean(self) -> float:
        """Return the mean over a day, from the middles between all changes."""
        spans = pairwise(sorted({*self.change_hours, _DAY_HOURS}))
        return sum(self.at((start + end) / 2) * (end - start) for start, end in spans) / _DAY_HOURS

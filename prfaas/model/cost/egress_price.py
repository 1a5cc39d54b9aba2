"""Values by time of day, such as the price of bytes that leave a cluster."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

DAY_HOURS = 24.0
_MONTH_HOURS = 730.0
_BYTES_PER_GB = 1e9
_BYTES_PER_GBIT = 125e6


@dataclass(frozen=True)
class Period:
    """Value between two hours of the day; a period may pass midnight."""

    start_hour: float
    end_hour: float
    value: float

    def includes(self, hour: float) -> bool:
        """Return whether an hour of the day lies in the period; equal hours are a whole day."""
        num_hours = (self.end_hour - self.start_hour) % DAY_HOURS or DAY_HOURS
        return (hour - self.start_hour) % DAY_HOURS < num_hours


@dataclass(frozen=True)
class ByHour:
    """Value, and other values in periods of the day. Where periods overlap the first one counts."""

    value: float
    periods: tuple[Period, ...] = ()

    def at(self, hour: float) -> float:
        """Return the value at an hour of the day."""
        return next((period.value for period in self.periods if period.includes(hour)), self.value)

    @property
    def change_hours(self) -> set[float]:
        """Return the hours of the day at which the value may change; midnight is one."""
        edges = {0.0}
        for period in self.periods:
            edges |= {period.start_hour % DAY_HOURS, period.end_hour % DAY_HOURS}
        return edges

    @property
    def mean(self) -> float:
        """Return the mean over a day."""
        return sum(self.at(start) * (end - start) for start, end in day_parts([self])) / DAY_HOURS


@dataclass(frozen=True)
class EgressPrice(ByHour):
    """Price per GB. `per_gbps_month` is paid for each Gbit/s of the day's 95th percentile, whoever sends when."""

    per_gbps_month: float = 0.0

    def per_hour(self, bytes_per_second: float, *, hour: float | None = None) -> float:
        """Return what the GB of a steady rate cost in an hour, on average over the day or at one hour of it."""
        price = self.mean if hour is None else self.at(hour)
        return bytes_per_second * 3600.0 / _BYTES_PER_GB * price

    def committed_per_hour(self, bytes_per_second: float) -> float:
        """Return what a 95th percentile costs in an hour."""
        return bytes_per_second / _BYTES_PER_GBIT * self.per_gbps_month / _MONTH_HOURS


def day_parts(values: Iterable[ByHour]) -> list[tuple[float, float]]:
    """Return the parts of a day in which no value changes, as (start hour, end hour)."""
    edges = set[float]().union(*(value.change_hours for value in values)) | {0.0, DAY_HOURS}
    return list(pairwise(sorted(edges)))

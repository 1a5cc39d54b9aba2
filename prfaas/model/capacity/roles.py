"""Roles of a PD cluster: instances' worth of decode that each number of prefill instances leaves."""

from dataclasses import dataclass
from itertools import pairwise
from math import atan2

from prfaas.model.capacity.decoding import DecodeCapacity
from prfaas.model.cost.colocation import Frontier, Line, at, concave_line
from prfaas.model.deployment import PdCluster

_NUM_BATCHES = 100  # Batches up to the largest one at which a shared instance is evaluated.


@dataclass(frozen=True)
class RoleCurve:
    """Greatest N_d for each N_p, a concave line that falls."""

    corners: Line

    @property
    def most_prefill(self) -> float:
        """Return the greatest N_p."""
        return self.corners[-1][0]

    def num_decode(self, num_prefill: float) -> float:
        """Return the N_d that goes with an N_p."""
        return at(self.corners, num_prefill) if num_prefill <= self.most_prefill else 0.0

    def limits(self) -> list[tuple[float, float, float]]:
        """Return (u, v, c) of each side u N_p + v N_d ≤ c, scaled so that one more instance of one role adds 1 to c."""
        sides = [(b - d, c - a, max(b - d, c - a), a, b) for (a, b), (c, d) in pairwise(self.corners)]
        return [(u / most, v / most, (u * a + v * b) / most) for u, v, most, a, b in sides]


def role_curve(cluster: PdCluster, capacity: DecodeCapacity) -> RoleCurve:
    """Return the curve of a cluster. Its sides are those of its shared instances, and one for the others."""
    shared, others = cluster.shared_instances, cluster.num_instances - cluster.shared_instances
    rates = shared_rates(cluster.frontier, capacity) if shared else ()
    sides = [(shared * (c - a), shared * (b - d)) for (a, b), (c, d) in pairwise(rates)]
    sides += [(float(others), float(others))] if others else []
    corners = [(0.0, float(cluster.num_instances))]
    # The flattest first: the sum of concave lines.
    for prefill, decode in sorted(sides, key=lambda side: atan2(side[1], side[0])):
        corners.append((corners[-1][0] + prefill, corners[-1][1] - decode))
    return RoleCurve(tuple(corners))


def shared_rates(frontier: Frontier, capacity: DecodeCapacity) -> Line:
    """Return the corners (prefill rate, decode rate) of an instance that does both, relative to each alone.

    A smaller batch meets the objective with slower decode, and pays the fixed part of a step for it. The device may
    alternate between batches, which overstates some rates by a few percent.
    """
    rates = [(0.0, 1.0)]
    for part in range(_NUM_BATCHES + 1):
        batch = capacity.max_batch * part / _NUM_BATCHES
        line, least = frontier.at(batch), capacity.least_speed(batch)
        prefill_by_decode = tuple((decode, prefill) for prefill, decode in reversed(line))
        rates.append((at(prefill_by_decode, least), capacity.rate(batch, least)))
        rates += [(prefill, capacity.rate(batch, decode)) for prefill, decode in line if decode > least]
    return concave_line(rates)

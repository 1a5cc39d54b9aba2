"""Roles of a PD cluster: instances' worth of decode that each number of prefill instances leaves."""

from dataclasses import dataclass
from itertools import pairwise
from math import atan2

from prfaas.model.capacity.decoding import DecodeCapacity
from prfaas.model.cost.colocation import Line, at
from prfaas.model.deployment import PdCluster


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
    rates = shared_rates(cluster.frontier, capacity)
    sides = [(shared * (c - a), shared * (b - d)) for (a, b), (c, d) in pairwise(rates)] if shared else []
    sides += [(float(others), float(others))] if others else []
    corners = [(shared * rates[0][0], float(cluster.num_instances))]
    # The flattest first: the sum of concave lines.
    for prefill, decode in sorted(sides, key=lambda side: atan2(side[1], side[0])):
        corners.append((corners[-1][0] + prefill, corners[-1][1] - decode))
    return RoleCurve(tuple(corners))


def shared_rates(frontier: Line, capacity: DecodeCapacity) -> Line:
    """Return the corners (prefill rate, decode rate) of an instance on a frontier of speeds, relative to each alone."""
    prefill_by_decode = tuple((b, a) for a, b in reversed(frontier))
    levels = [level for level, _ in capacity.rate_by_speed if frontier[-1][1] < level < 1.0]
    corners = {*frontier, *((at(prefill_by_decode, level), level) for level in levels)}
    ordered = sorted(corners, key=lambda corner: (corner[0], -corner[1]))
    return tuple((a, at(capacity.rate_by_speed, b)) for a, b in ordered if b >= capacity.rate_by_speed[0][0])

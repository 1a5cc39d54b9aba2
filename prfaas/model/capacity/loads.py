"""Mean load of an arriving request on each station under a threshold."""

import math
from dataclasses import dataclass
from functools import cached_property

from prfaas.model.capacity.decoding import DecodeCapacity, decode_capacity
from prfaas.model.capacity.roles import role_curve
from prfaas.model.cost.curve import new_tokens, of_new_tokens, unit_cost
from prfaas.model.cost.lengths import Cumulative
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment

_ROUNDING = 1e-14  # A smaller difference is rounding noise.


@dataclass(frozen=True)
class Loads:
    """Loads per arriving request at one threshold.

    `remote_seconds` and `local_seconds` hold for each cluster as if it took all offloaded or all local requests.
    """

    threshold_tokens: float
    offload_ratio: float
    local_ratio: float
    offloaded_tokens: float
    remote_seconds: tuple[float, ...]
    remote_bytes: float
    local_seconds: tuple[float, ...]
    local_bytes: float

    @property
    def mean_offloaded_tokens(self) -> float:
        """Return l_long of equation (3)."""
        return self.offloaded_tokens / self.offload_ratio


def prfaas_throughput(
    num_prfaas: float, prefill_seconds: float, *, egress_bytes_per_second: float, kv_bytes: float
) -> float:
    """Return equation (3), Θ_prfaas = min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long))."""
    computed = num_prfaas / prefill_seconds if prefill_seconds else math.inf
    return min(computed, egress_bytes_per_second / kv_bytes if kv_bytes else math.inf)


class LoadModel:
    """Loads of one deployment and workload at any threshold, as expectations over the lengths."""

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        self.deployment = deployment
        self.workload = workload
        self.lengths = workload.lengths
        self.decode: tuple[DecodeCapacity, ...] = tuple(
            decode_capacity(cluster, deployment, workload) for cluster in deployment.pd
        )
        self.roles = tuple(map(role_curve, deployment.pd, self.decode))
        self._kv = deployment.model.curve()
        self._stations = [(cluster.num_instances, deployment.egress(cluster)) for cluster in deployment.prfaas]
        self._remote = [cluster.profile.prefill for cluster in deployment.prfaas]
        self._local = [cluster.profile.prefill for cluster in deployment.pd]
        self._mass = self.lengths.cumulative(unit_cost)
        self._tokens = self.lengths.cumulative(new_tokens)

    @property
    def everything_offloaded(self) -> int:
        """Return the greatest threshold below every length."""
        return max(int(self.lengths.support[0]) - 1, 0)

    @property
    def nothing_offloaded(self) -> int:
        """Return the least threshold that is no shorter than any length."""
        return -int(-self.lengths.support[1] // 1)

    def remote_rates(self, loads: Loads) -> list[float]:
        """Return Θ_prfaas / p of each PrfaaS cluster, the arrivals per second for which it alone suffices."""
        return [
            prfaas_throughput(count, seconds, egress_bytes_per_second=egress, kv_bytes=loads.remote_bytes)
            for (count, egress), seconds in zip(self._stations, loads.remote_seconds, strict=True)
        ]

    def decode_seconds(self) -> tuple[float, ...]:
        """Return decode instance-seconds of an average request in each PD cluster."""
        return tuple(capacity.request_seconds(self.workload.output.mean) for capacity in self.decode)

    @cached_property
    def _total_tokens(self) -> float:
        return self._tokens(self.lengths.support[1])

    @cached_property
    def _parts(self) -> tuple[list[Cumulative], list[Cumulative], Cumulative]:
        each = {profile: self.lengths.cumulative(profile.at) for profile in {*self._remote, *self._local}}
        remote, local = ([each[profile] for profile in profiles] for profiles in (self._remote, self._local))
        return remote, local, self.lengths.cumulative(of_new_tokens(self._kv))

    @cached_property
    def _totals(self) -> tuple[list[float], float]:
        top = self.lengths.support[1]
        remote, _, kv = self._parts
        return [partial(top) for partial in remote], kv(top)

    def at(self, threshold: float) -> Loads:
        """Return the loads at one threshold."""
        remote, local, kv = self._parts
        remote_totals, kv_total = self._totals
        below = self._mass(threshold)
        bytes_below = kv(threshold)
        offloads = 1.0 - below > _ROUNDING
        above = 1.0 - below if offloads else 0.0
        return Loads(
            threshold,
            offload_ratio=above,
            local_ratio=below,
            offloaded_tokens=self._total_tokens - self._tokens(threshold),
            remote_seconds=tuple(
                offloads * (total - part(threshold)) for total, part in zip(remote_totals, remote, strict=True)
            ),
            remote_bytes=offloads * (kv_total - bytes_below),
            local_seconds=tuple(part(threshold) for part in local),
            local_bytes=bytes_below,
        )

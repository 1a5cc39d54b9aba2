"""The best threshold and split of a deployment with one PD cluster, to the token, by root finding."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from prfaas.model.capacity import throughput
from prfaas.model.capacity.loads import LoadModel, Loads
from prfaas.model.cost.curve import FloatArray, best_fraction, best_of_two, first_at_least
from prfaas.model.deployment import PdCluster
from prfaas.model.planning.plan import Limit, Plan, Split

# Where the paper's form is scanned before the root is sought: its curves need not be monotone.
_NUM_SCANNED = 96


class SinglePd:
    """Any number of PrfaaS clusters, each with its own link, before one PD cluster.

    For a threshold t and N_p the system sustains min(long(t), short(t, N_p), decode(N_p)). In exact form long rises
    with t and short falls, so the best t lies where they meet; at the best t prefill rises with N_p and decode falls,
    so the best N_p lies where these meet.
    """

    def __init__(self, loads: LoadModel) -> None:
        deployment = loads.deployment
        (self._pd,) = deployment.pd
        self._loads = loads
        self._stations = [(cluster.num_instances, deployment.egress(cluster)) for cluster in deployment.prfaas]
        (self._decode_seconds,) = loads.decode_seconds()

    def plan(self) -> Plan:
        """Return the best threshold and split."""
        num_prefill = self.best_split()
        return self.at(self.best_threshold(num_prefill), num_prefill)

    def sustained(self, threshold: float, num_prefill: float) -> float:
        """Λ_max of equation (6) at this threshold and split."""
        loads = self._loads.at(threshold)
        return min(self.long(loads), self.short(loads, num_prefill), self.decode(num_prefill))

    def long(self, loads: Loads) -> float:
        """Σ Θ_prfaas / p: arrivals per second for which the PrfaaS clusters suffice."""
        if not loads.offload_ratio:
            return math.inf
        return sum(
            throughput.prfaas_throughput(
                count, seconds, egress_bytes_per_second=egress, kv_bytes=loads.remote_bytes
            )
            for (count, egress), seconds in zip(self._stations, loads.remote_seconds, strict=True)
        )  # fmt: skip

    def short(self, loads: Loads, num_prefill: float) -> float:
        """Θ_pd-p / (1 − p): arrivals per second for which the local prefill instances suffice."""
        return (
            throughput.pd_prefill_throughput(num_prefill, _busy_seconds(self._pd, loads))
            if loads.local_ratio
            else math.inf
        )

    def decode(self, num_prefill: float) -> float:
        """Θ_pd-d of what N_p leaves."""
        return self._pd.num_decode(num_prefill) / self._decode_seconds

    def best_threshold(self, num_prefill: float) -> int:
        """Return the t that sustains most with N_p prefill instances, decode left aside: equation (7), to the token."""
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        if not self._stations:
            return high
        if self._loads.method == "paper":
            low, best, high = self._bracket(num_prefill)
            met = self._crossing(num_prefill, low, high)
            return max(best, met, key=lambda t: self._prefilled(self._loads.at(t), num_prefill))
        return self._crossing(num_prefill, low, high)

    def _crossing(self, num_prefill: float, low: int, high: int) -> int:
        """Return where the two sides meet between two thresholds."""
        return best_of_two(
            lambda t: self._prefilled(self._loads.at(t), num_prefill),
            lambda t: self._remote_wins(self._loads.at(t), num_prefill),
            low,
            high,
        )

    def _prefilled(self, loads: Loads, num_prefill: float) -> float:
        return min(self.long(loads), self.short(loads, num_prefill))

    def _remote_wins(self, loads: Loads, num_prefill: float) -> bool:
        return self.long(loads) >= self.short(loads, num_prefill)

    @cached_property
    def _scan(self) -> tuple[list[int], FloatArray, FloatArray]:
        """Thresholds over the whole range with long and short for N_p = 1."""
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        spaced = np.geomspace(max(low, 1), high, _NUM_SCANNED).astype(int).tolist()
        asked = np.ceil(self._loads.lengths.points(_NUM_SCANNED)[0]).astype(int).tolist()
        thresholds = sorted({low, *spaced, *asked, high})
        loads = [self._loads.at(t) for t in thresholds]
        return thresholds, np.array([self.long(at) for at in loads]), np.array([self.short(at, 1.0) for at in loads])

    def _bracket(self, num_prefill: float) -> tuple[int, int, int]:
        """Return the best of the scanned thresholds between its neighbours."""
        thresholds, long, short = self._scan
        with np.errstate(invalid="ignore"):
            sustained = np.minimum(long, np.where(np.isinf(short), np.inf, short * num_prefill))
        best = int(np.argmax(sustained))
        return thresholds[max(best - 1, 0)], thresholds[best], thresholds[min(best + 1, len(thresholds) - 1)]

    def best_split(self) -> float:
        """Return the N_p that sustains most: equation (8), to the instance, or to the fraction where instances are shared."""
        if self._pd.num_prefill is not None:
            return float(self._pd.num_prefill)
        if self._pd.shared_instances:
            low = max(0.0, self._pd.roles - self._pd.num_instances)
            return best_fraction(self._at_best_threshold, self._prefill_wins, low, float(self._pd.num_instances))
        return float(best_of_two(self._at_best_threshold, self._prefill_wins, 0, self._pd.num_instances))

    def _at_best_threshold(self, num_prefill: float) -> float:
        return self.sustained(self.best_threshold(num_prefill), num_prefill)

    def _prefill_wins(self, num_prefill: float) -> bool:
        loads = self._loads.at(self.best_threshold(num_prefill))
        return self._prefilled(loads, num_prefill) >= self.decode(num_prefill)

    def equally_good(self, plan: Plan, *, tolerance: float) -> tuple[int, int]:
        """Return the thresholds around the plan's that sustain at least (1 − tolerance) of it."""
        assert plan.threshold_tokens is not None
        split, enough = plan.num_prefill, plan.system_throughput * (1 - tolerance)
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        first = first_at_least(lambda t: self.sustained(t, split) >= enough, low, plan.threshold_tokens)
        too_far = first_at_least(lambda t: self.sustained(t, split) < enough, plan.threshold_tokens, high + 1)
        return first, max(too_far - 1, plan.threshold_tokens)

    def at(self, threshold: int, num_prefill: float) -> Plan:
        """Return the operating point of a given threshold and split."""
        loads = self._loads.at(threshold)
        offload, local = loads.offload_ratio, loads.local_ratio
        sustained = self.sustained(threshold, num_prefill)
        return Plan(
            name=self._loads.deployment.name,
            threshold_tokens=threshold if self._stations and num_prefill else None,
            splits=(Split(self._pd.name, num_prefill, self._pd.num_decode(num_prefill)),),
            offload_ratio=offload,
            local_ratio=local,
            mean_offloaded_tokens=loads.mean_offloaded_tokens if offload else None,
            prfaas_throughput=self.long(loads) * offload if offload else None,
            pd_prefill_throughput=self.short(loads, num_prefill) * local if local else None,
            pd_decode_throughput=self.decode(num_prefill),
            system_throughput=sustained,
            egress_bytes_per_second=sustained * loads.remote_bytes if self._stations else None,
            local_bytes_per_second=sustained * loads.local_bytes,
            limit=self._limit(loads, num_prefill),
            remote_shares=self._shares(loads),
            local_shares=(1.0,),
        )

    def _shares(self, loads: Loads) -> tuple[float, ...]:
        if not loads.offload_ratio:
            return tuple(0.0 for _ in self._stations)
        each = [
            throughput.prfaas_throughput(n, seconds, egress_bytes_per_second=egress, kv_bytes=loads.remote_bytes)
            for (n, egress), seconds in zip(self._stations, loads.remote_seconds, strict=True)
        ]
        return tuple(rate / sum(each) for rate in each) if sum(each) else tuple(0.0 for _ in each)

    def _limit(self, loads: Loads, num_prefill: float) -> Limit:
        long, short, decode = self.long(loads), self.short(loads, num_prefill), self.decode(num_prefill)
        if decode <= min(long, short):
            return "pd-decode"
        if short < long:
            return "pd-prefill"
        computed = sum(n / seconds for (n, _), seconds in zip(self._stations, loads.remote_seconds, strict=True))
        return "link" if long < computed * (1 - 1e-9) else "prfaas"


def _busy_seconds(cluster: PdCluster, loads: Loads) -> float:
    """Prefill-instance-seconds per arriving request: computing, or sending to the decode nodes where that takes longer."""
    if cluster.intra_bytes_per_second is None:
        return loads.local_seconds[0]
    return max(loads.local_seconds[0], loads.local_bytes / cluster.intra_bytes_per_second)

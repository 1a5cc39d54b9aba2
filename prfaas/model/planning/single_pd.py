"""Best threshold and split of a deployment with one PD cluster, exact to the token, by root finding."""

import math
from collections.abc import Callable

from prfaas.model.capacity.loads import LoadModel, Loads
from prfaas.model.planning.plan import Limit, Plan, Split


class SinglePd:
    """Planner for any number of PrfaaS clusters, each with its own path, before one PD cluster.

    For a threshold t and N_p the system sustains min(long(t), short(t, N_p), decode(N_p)). Long rises with t and short
    falls, so the best t lies where they meet. At the best t, prefill rises with N_p and decode falls, so the best N_p
    lies where these meet.
    """

    def __init__(self, loads: LoadModel) -> None:
        deployment = loads.deployment
        (self._pd,) = deployment.pd
        self._loads = loads
        self._prfaas = deployment.prfaas
        (self._decode_seconds,), (self._roles,) = loads.decode_seconds(), loads.roles

    def plan(self) -> Plan:
        """Return the best threshold and split."""
        num_prefill = self.best_split()
        return self.at(self.best_threshold(num_prefill), num_prefill)

    def sustained(self, threshold: float, num_prefill: float) -> float:
        """Return Λ_max of equation (6) at this threshold and split."""
        loads = self._loads.at(threshold)
        return min(self.long(loads), self.short(loads, num_prefill), self.decode(num_prefill))

    def long(self, loads: Loads) -> float:
        """Return Σ Θ_prfaas / p, the arrivals per second for which the PrfaaS clusters suffice."""
        return sum(self._loads.remote_rates(loads)) if loads.offload_ratio else math.inf

    def short(self, loads: Loads, num_prefill: float) -> float:
        """Return Θ_pd-p / (1 − p), the arrivals per second for which the local prefill instances suffice: equation (4)."""
        return num_prefill / loads.local_seconds[0] if loads.local_seconds[0] else math.inf

    def decode(self, num_prefill: float) -> float:
        """Return Θ_pd-d of the instances that N_p leaves."""
        return self._roles.num_decode(num_prefill) / self._decode_seconds

    def best_threshold(self, num_prefill: float) -> int:
        """Return the t that sustains most prefill with N_p instances: equation (7), to the token."""
        low, high = self._loads.everything_offloaded, self._loads.nothing_offloaded
        if not self._prfaas:
            return high
        return _best_of_two(
            lambda t: self._prefilled(self._loads.at(t), num_prefill),
            lambda t: self._remote_wins(self._loads.at(t), num_prefill),
            low,
            high,
        )

    def greatest_threshold(self, num_prefill: float, enough: float) -> int | None:
        """Return the greatest t that sustains `enough` requests per second; None if no t does."""
        best = self.best_threshold(num_prefill)
        if self.sustained(best, num_prefill) < enough:
            return None
        high = self._loads.nothing_offloaded
        return first_at_least(lambda t: self.sustained(t, num_prefill) < enough, best, high + 1) - 1

    def _prefilled(self, loads: Loads, num_prefill: float) -> float:
        return min(self.long(loads), self.short(loads, num_prefill))

    def _remote_wins(self, loads: Loads, num_prefill: float) -> bool:
        return self.long(loads) >= self.short(loads, num_prefill)

    def best_split(self) -> float:
        """Return the N_p that sustains most by equation (8); a fraction only if instances are shared."""
        if self._pd.num_prefill is not None:
            return float(self._pd.num_prefill)
        if self._pd.shared_instances:
            return _best_fraction(self._at_best_threshold, self._prefill_wins, 0.0, self._roles.most_prefill)
        return float(_best_of_two(self._at_best_threshold, self._prefill_wins, 0, self._pd.num_instances))

    def _at_best_threshold(self, num_prefill: float) -> float:
        return self.sustained(self.best_threshold(num_prefill), num_prefill)

    def _prefill_wins(self, num_prefill: float) -> bool:
        loads = self._loads.at(self.best_threshold(num_prefill))
        return self._prefilled(loads, num_prefill) >= self.decode(num_prefill)

    def at(self, threshold: int, num_prefill: float) -> Plan:
        """Return the operating point of a given threshold and split."""
        loads = self._loads.at(threshold)
        offload, local = loads.offload_ratio, loads.local_ratio
        sustained = self.sustained(threshold, num_prefill)
        return Plan(
            name=self._loads.deployment.name,
            threshold_tokens=threshold if self._prfaas and num_prefill else None,
            splits=(Split(self._pd.name, num_prefill, self._roles.num_decode(num_prefill)),),
            offload_ratio=offload,
            local_ratio=local,
            mean_offloaded_tokens=loads.mean_offloaded_tokens if offload else None,
            prfaas_throughput=self.long(loads) * offload if offload else None,
            pd_prefill_throughput=self.short(loads, num_prefill) * local if local else None,
            pd_decode_throughput=self.decode(num_prefill),
            system_throughput=sustained,
            egress_bytes_per_second=sustained * loads.remote_bytes if self._prfaas else None,
            local_bytes_per_second=sustained * loads.local_bytes,
            limit=self._limit(loads, num_prefill),
            remote_shares=self._shares(loads),
            local_shares=(1.0,),
        )

    def _shares(self, loads: Loads) -> tuple[float, ...]:
        rates = self._loads.remote_rates(loads) if loads.offload_ratio else []
        if not sum(rates):
            return tuple(0.0 for _ in self._prfaas)
        return tuple(rate / sum(rates) for rate in rates)

    def _limit(self, loads: Loads, num_prefill: float) -> Limit:
        long, short, decode = self.long(loads), self.short(loads, num_prefill), self.decode(num_prefill)
        if decode <= min(long, short):
            return "pd-decode"
        if short < long:
            return "pd-prefill"
        computed = sum(c.num_instances / seconds for c, seconds in zip(self._prfaas, loads.remote_seconds, strict=True))
        return "link" if long < computed * (1 - 1e-9) else "prfaas"


def first_at_least(claim: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least integer in [low, high] for which `claim` holds.

    The claim holds at `high` and, once true, stays true.
    """
    while low < high:
        middle = (low + high) // 2
        if claim(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _best_of_two(value: Callable[[int], float], rising_wins: Callable[[int], bool], low: int, high: int) -> int:
    """Return the integer that maximises min(rising, falling); `rising_wins` says whether rising ≥ falling.

    The greatest minimum lies at the crossing or just before it.
    """
    after = first_at_least(rising_wins, low, high)
    return max((max(after - 1, low), after), key=value)


def _best_fraction(
    value: Callable[[float], float], rising_wins: Callable[[float], bool], low: float, high: float
) -> float:
    """Return the real number that maximises min(rising, falling), to one part in 10^12 of the interval."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if rising_wins(middle):
            high = middle
        else:
            low = middle
    return max((low, high), key=value)

"""Summary of a run: latencies, throughput, goodput and loads."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from prfaas.model.cost.curve import FloatArray
from prfaas.sim.kernel.meter import Load
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import GoodputSection

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Distribution:
    """Mean and quantiles in the order of `QUANTILES`, in seconds; NaN without values."""

    mean: float
    quantiles: tuple[float, ...]

    def quantile(self, ratio: float) -> float:
        """Return one of `QUANTILES`."""
        return self.quantiles[QUANTILES.index(ratio)]


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    `throughput`, `goodput` and `arrivals` are requests per second between the warm-up's end and the last arrival. Ratios
    are shares of the counted requests: `success_ratio` ended within the timeout, `attainment` met the objectives,
    `retried_ratio` were sent again, `preempted_ratio` were
    preempted. `cached_ratio` is the share of prompt tokens that was found in caches. `utilisation` (by station, or
    by cluster and role) and egress are means from 0 to the last arrival.
    """

    num_requests: int
    arrivals: float
    throughput: float
    goodput: float
    success_ratio: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    end_to_end: Distribution
    prefill_wait: Distribution
    reasons: Mapping[str, float]
    egress_bytes_per_second: float
    utilisation: Mapping[str, float] = field(default_factory=dict)
    retried_ratio: float = 0.0
    attainment: float = 1.0
    cached_ratio: float = 0.0
    preempted_ratio: float = 0.0


def distribution(values: FloatArray, weights: FloatArray | None = None) -> Distribution:
    """Return the distribution of values in seconds, optionally weighted."""
    if not len(values):
        return Distribution(float("nan"), (float("nan"),) * len(QUANTILES))
    if weights is None:
        return Distribution(float(values.mean()), tuple(np.quantile(values, QUANTILES).tolist()))
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    indices = np.minimum(np.searchsorted(reached, np.array(QUANTILES) * reached[-1]), len(values) - 1)
    return Distribution(float(values @ weights / weights.sum()), tuple(values[order][indices].tolist()))


@dataclass(frozen=True)
class CountingRules:
    """Rules of measurement: the first `warmup_ratio` of the requests is not counted."""

    goodput: GoodputSection = field(default_factory=GoodputSection)
    warmup_ratio: float = 0.1
    timeout_seconds: float = float("inf")


def summarise(
    requests: Sequence[SimulatedRequest], counting: CountingRules, *, loads: Mapping[str, Load] = MappingProxyType({})
) -> Summary:
    """Return the summary of all requests of a run, ascending by arrival."""
    counted = requests[int(len(requests) * counting.warmup_ratio) :]
    start, end = counted[0].arrival, requests[-1].arrival
    span = max(end - start, 1e-12)
    in_time = [request for request in counted if request.end_to_end <= counting.timeout_seconds]
    ended = sum(1 for request in requests if start < request.decode_end <= end)
    reasons = Counter(request.reason for request in counted)
    attainment = sum(counting.goodput.met(request) for request in in_time) / len(counted)
    prompt_tokens = sum(request.num_prompt_tokens for request in counted)
    means = {name: load.until(max(end, 1e-12)) for name, load in loads.items()}
    return Summary(
        num_requests=len(counted),
        arrivals=(len(counted) - 1) / span,
        throughput=ended / span,
        goodput=attainment * ended / span,
        attainment=attainment,
        success_ratio=len(in_time) / len(counted),
        ttft=_distribution_of(in_time, lambda request: request.ttft),
        tpot=_distribution_of([r for r in in_time if r.num_output_tokens > 1], lambda request: request.tpot),
        itl=_gaps([request for request in in_time if request.num_output_tokens > 1]),
        end_to_end=_distribution_of(in_time, lambda request: request.end_to_end),
        prefill_wait=_distribution_of(in_time, lambda request: request.prefill_start - request.arrival),
        reasons={reason: count / len(counted) for reason, count in sorted(reasons.items())},
        egress_bytes_per_second=math.fsum(mean for name, mean in means.items() if name.startswith("egress")),
        utilisation={name.removeprefix("busy "): mean for name, mean in means.items() if name.startswith("busy ")},
        cached_ratio=sum(request.num_found_tokens for request in counted) / prompt_tokens,
        retried_ratio=_share(counted, lambda request: request.num_retries > 0),
        preempted_ratio=_share(counted, lambda request: request.num_preemptions > 0),
    )


def _share(requests: Sequence[SimulatedRequest], condition: Callable[[SimulatedRequest], bool]) -> float:
    return sum(map(condition, requests)) / len(requests)


def _distribution_of(requests: Sequence[SimulatedRequest], value: Callable[[SimulatedRequest], float]) -> Distribution:
    return distribution(np.array([value(request) for request in requests]))


def _gaps(requests: Sequence[SimulatedRequest]) -> Distribution:
    """Return the distribution of the gaps between tokens of these requests, each of which has a gap."""
    if not requests:
        return distribution(np.array([]))
    seconds, num_tokens = zip(*(request.gaps for request in requests), strict=True)
    return distribution(np.concatenate(seconds), np.concatenate(num_tokens))

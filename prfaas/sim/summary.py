"""What a run says: latencies, goodput, throughput, reasons, over the requests after the warm-up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prfaas.model.curve import FloatArray
from prfaas.sim.meter import Load
from prfaas.sim.over_time import loads_over_time, requests_over_time
from prfaas.sim.request import Request

QUANTILES = (0.5, 0.9, 0.95, 0.99)
_PERCENTS = tuple(percent / 100 for percent in range(101))


@dataclass(frozen=True)
class Distribution:
    """Mean and quantiles (of `QUANTILES`, in order) in seconds; of nothing they are NaN."""

    mean: float
    quantiles: tuple[float, ...]
    percentiles: tuple[float, ...] = ()  # 0 to 100, for plots

    def quantile(self, ratio: float) -> float:
        """One of `QUANTILES`."""
        return self.quantiles[QUANTILES.index(ratio)]


@dataclass(frozen=True)
class Slo:
    """Service-level objectives of goodput; None asks for nothing.

    `ttft_seconds_per_thousand` grows with the prompt: so many seconds for each started 1,000 tokens.
    """

    ttft_seconds: float | None = None
    ttft_seconds_per_thousand: float | None = None
    tpot_seconds: float | None = None
    itl_seconds: float | None = None  # of the P95 of a request's own gaps
    attained_ratio: float = 0.0  # so many requests must meet it, else nothing is good

    def met(self, request: Request) -> bool:
        """Whether a request that ended meets all of them."""
        bounds = [] if self.ttft_seconds is None else [self.ttft_seconds]
        if self.ttft_seconds_per_thousand is not None:
            bounds.append(self.ttft_seconds_per_thousand * -(-request.num_prompt_tokens // 1000))
        if any(request.ttft > bound for bound in bounds):
            return False
        if self.tpot_seconds is not None and request.tpot > self.tpot_seconds:
            return False
        return self.itl_seconds is None or request.gap_quantile(0.95) <= self.itl_seconds


@dataclass(frozen=True)
class Summary:
    """`throughput`, `goodput` and `arrivals` are requests per second, between the warm-up's end and the last arrival.

    `success_ratio` is the share of requests whose last token came within the time-out. `utilisation` (by station or
    instance), `memory` and `egress_bytes_per_second` are means from 0 to the last arrival, as is `over_time` by parts.
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
    retried_ratio: float = 0.0  # of the requests, those that were sent again
    attainment: float = 1.0  # share of the requests that meet the objectives
    cached_ratio: float = 0.0  # of the prompts' tokens, those that were found where they were prefilled
    stale_ratio: float = 0.0  # of the requests, those of whose prefix less was there than the index had said
    memory: Mapping[str, float] = field(default_factory=dict)  # share of the KV memory held, by cluster and role
    preempted_ratio: float = 0.0  # of the requests, those that gave their KV up at least once
    num_preemptions: int = 0
    over_time: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of `over_time.py`


def distribution(values: FloatArray, weights: FloatArray | None = None) -> Distribution:
    """Of values in seconds; with weights a value counts that often."""
    if not len(values):
        return Distribution(float("nan"), (float("nan"),) * len(QUANTILES))
    if weights is None:
        percentiles = tuple(np.quantile(values, _PERCENTS).tolist())
        return Distribution(float(values.mean()), tuple(np.quantile(values, QUANTILES).tolist()), percentiles)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])

    def at(ratios: Sequence[float]) -> tuple[float, ...]:
        indices = np.minimum(np.searchsorted(reached, np.array(ratios) * reached[-1]), len(values) - 1)
        return tuple(values[order][indices].tolist())

    return Distribution(float(values @ weights / weights.sum()), at(QUANTILES), at(_PERCENTS))


@dataclass(frozen=True)
class Counting:
    """What is counted: requests after the first `warmup_ratio` of them, against these objectives."""

    slo: Slo = Slo()
    warmup_ratio: float = 0.1
    timeout_seconds: float = float("inf")


def summarise(
    requests: Sequence[Request],
    counting: Counting,
    *,
    gaps: tuple[FloatArray, FloatArray] | None = None,
    busy: Mapping[str, Load] | None = None,
    loads: Mapping[str, Load] | None = None,
) -> Summary:
    """The summary of all requests of a run, ascending by arrival; `gaps` are inter-token gaps with their weights."""
    counted = requests[int(len(requests) * counting.warmup_ratio) :]
    start, end = counted[0].arrival, requests[-1].arrival
    span = max(end - start, 1e-12)
    in_time = [one for one in counted if one.end_to_end <= counting.timeout_seconds]
    ended = sum(1 for one in requests if start < one.decode_end <= end)
    reasons = Counter(one.reason for one in counted)
    attainment = sum(1 for one in in_time if counting.slo.met(one)) / len(counted)
    prompts = sum(one.num_prompt_tokens for one in counted)
    means = {name: _mean(load, end) for name, load in (loads or {}).items()}
    return Summary(
        num_requests=len(counted),
        arrivals=(len(counted) - 1) / span,
        throughput=ended / span,
        goodput=attainment * ended / span if attainment >= counting.slo.attained_ratio else 0.0,
        attainment=attainment,
        success_ratio=len(in_time) / len(counted),
        ttft=_of(in_time, lambda one: one.ttft),
        tpot=_of([one for one in in_time if one.num_output_tokens > 1], lambda one: one.tpot),
        itl=_gaps(in_time) if gaps is None else distribution(*gaps),
        end_to_end=_of(in_time, lambda one: one.end_to_end),
        prefill_wait=_of(in_time, lambda one: one.prefill_start - one.arrival),
        reasons={reason: count / len(counted) for reason, count in sorted(reasons.items())},
        egress_bytes_per_second=math.fsum(mean for name, mean in means.items() if name.startswith("egress")),
        utilisation={name: _mean(load, end) for name, load in (busy or {}).items()},
        over_time=requests_over_time(requests, end) | loads_over_time(loads or {}, end),
        memory={name: mean for name, mean in means.items() if name.startswith("memory ")},
        cached_ratio=sum(one.num_found_tokens for one in counted) / prompts,
        stale_ratio=sum(1 for one in counted if one.num_found_tokens < one.num_known_tokens) / len(counted),
        retried_ratio=sum(1 for one in counted if one.num_retries) / len(counted),
        preempted_ratio=sum(1 for one in counted if one.num_preemptions) / len(counted),
        num_preemptions=sum(one.num_preemptions for one in counted),
    )


def _mean(load: Load, end: float) -> float:
    return load.over(np.array([0.0, max(end, 1e-12)]))[0]


def _of(requests: Sequence[Request], value: Callable[[Request], float]) -> Distribution:
    return distribution(np.array([value(one) for one in requests]))


def _gaps(requests: Sequence[Request]) -> Distribution:
    """Where decode steps are equally long, a request's gaps all equal its TPOT."""
    decoded = [one for one in requests if one.num_output_tokens > 1]
    weights = np.array([one.num_output_tokens - 1 for one in decoded], dtype=float)
    return distribution(np.array([one.tpot for one in decoded]), weights)

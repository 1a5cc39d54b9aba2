"""Plan for programs: one JSON object, and settings for the manager."""

import math
from collections.abc import Sequence
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.cost.lengths import mean_tokens
from prfaas.model.cost.workload import Workload
from prfaas.model.planning.fleet import Day, Demand, Fleet
from prfaas.solve.study import FleetAnswer, Option, Study


def to_json(study: Study) -> dict[str, Any]:
    """Return the plan as JSON. Throughputs are requests per second; TTFT is without queues; null means not applicable.

    `bound` is the upper bound of the linear program, with the value of one more unit of each resource in `duals`. The
    fleet for a demand or a budget is `fleet`, beside PD instances alone and the fleets of the parts of the day.
    """
    return {
        "trace": _trace(study.workload),
        "deployments": [figures(option) for option in study.options],
        "bound": {
            "system_throughput": study.fractional.system_throughput,
            "integer_split_system_throughput": study.integer.system_throughput,
            "duals": {name: float(value) for name, value in study.duals.items()},
        },
    } | (_fleets(study.fleet) if study.fleet else {})


def _fleets(answer: FleetAnswer) -> dict[str, Any]:
    resized = zip(answer.resized.demands, answer.resized.parts, strict=True) if answer.resized else ()
    return {
        "fleet": _day(answer.day),
        "pd_alone": answer.local and _day(answer.local),
        "resized": [
            _fleet([(demand, part)], part.per_hour, part.egress_per_hour + part.committed_per_hour)
            for demand, part in resized
        ],
    }


def _day(day: Day) -> dict[str, Any]:
    return _fleet(list(zip(day.demands, day.parts, strict=True)), day.per_hour, day.egress_per_hour)


def _fleet(served: Sequence[tuple[Demand, Fleet]], per_hour: float, egress_per_hour: float) -> dict[str, Any]:
    """Return the instances and the price of a fleet, and its plan for each part of the day."""
    parts = [
        {
            "hour": demand.hour,
            "hours": demand.hours,
            "requests_per_second": demand.requests_per_second,
            "threshold_tokens": part.plan.threshold_tokens,
            "num_prefill": part.plan.num_prefill,
            "num_decode": part.plan.num_decode,
            "offload_ratio": part.plan.offload_ratio,
            "egress_gbps": part.egress_bytes_per_second * 8 / 1e9,
        }
        for demand, part in served
    ]
    return {
        "instances": {cluster.name: cluster.num_instances for cluster in served[0][1].deployment.clusters},
        "cost_per_hour": per_hour,
        "egress_per_hour": egress_per_hour,
        "parts": parts,
    }


def _trace(workload: Workload) -> dict[str, Any]:
    low, high = workload.lengths.support
    return {
        "name": workload.name,
        "mean_uncached_tokens": mean_tokens(workload.lengths),
        "min_uncached_tokens": low,
        "max_uncached_tokens": high,
        "mean_output_tokens": workload.output.mean,
    }


def figures(option: Option) -> dict[str, Any]:
    """Return the figures of one deployment; None where a figure does not apply."""
    plan, deployment = option.plan, option.deployment
    remote = bool(deployment.prfaas)
    egress = plan.egress_bytes_per_second
    return {
        "name": deployment.name,
        "threshold_tokens": plan.threshold_tokens,
        "num_prfaas": sum(cluster.num_instances for cluster in deployment.prfaas) if remote else None,
        "num_prefill": _whole(plan.num_prefill) if plan.num_prefill else None,
        "num_decode": _whole(plan.num_decode),
        "offload_ratio": plan.offload_ratio if remote else None,
        "mean_offloaded_tokens": plan.mean_offloaded_tokens,
        "prfaas_throughput": plan.prfaas_throughput,
        "pd_prefill_throughput": plan.pd_prefill_throughput,
        "pd_decode_throughput": plan.pd_decode_throughput,
        "system_throughput": plan.system_throughput,
        "egress_gbps": None if egress is None else egress * 8 / 1e9,
        "ttft_mean_seconds": _finite(option.queue_free.mean_seconds),
        "ttft_p90_seconds": _finite(option.queue_free.quantile_seconds),
        "cost_per_hour": option.price_per_hour,
    }


def _whole(count: float) -> float | int:
    return round(count) if abs(count - round(count)) < 1e-9 else count


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def manager_settings(study: Study) -> str:
    """Return YAML for `prfaas-manager --config`: the threshold, and as comments the roles to start instances with.

    Raises:
        ConfigError: the plan offloads nothing or everything, or a day has several thresholds.
    """
    plan = study.main.plan
    if study.fleet and len(study.fleet.day.parts) > 1:
        raise ConfigError("--emit: the thresholds of a day differ by the hour; give --demand one rate")
    if plan.threshold_tokens is None:
        raise ConfigError("--emit: this plan has no threshold: it offloads nothing, or everything")
    roles = [f"# {split.cluster}: {split.num_prefill:g} prefill, {split.num_decode:g} decode" for split in plan.splits]
    roles += [f"# {cluster.name}: {cluster.num_instances} prefill" for cluster in study.main.deployment.prfaas]
    lines = "\n".join(roles)
    return (
        f"# Written by prfaas-solve for {study.workload.name}.\n"
        f"# Sustains {plan.system_throughput:.3f} req/s, offloading {plan.offload_ratio:.1%} of the requests.\n"
        f"# Instances by role:\n{lines}\n"
        f"threshold_tokens: {plan.threshold_tokens}\n"
    )

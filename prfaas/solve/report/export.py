"""Plan for programs: one JSON object, and settings for the manager."""

import math
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.cost.lengths import mean_tokens
from prfaas.model.cost.workload import Workload
from prfaas.solve.study import Option, Study


def to_json(study: Study) -> dict[str, Any]:
    """Return the plan as JSON. Throughputs are requests per second; TTFT is without queues; null means not applicable.

    `bound` is the upper bound of the linear program, with the value of one more unit of each resource in `duals`.
    """
    return {
        "trace": _trace(study.workload),
        "deployments": [figures(option) for option in study.options],
        "bound": {
            "system_throughput": study.fractional.system_throughput,
            "integer_split_system_throughput": study.integer.system_throughput,
            "duals": {name: float(value) for name, value in study.duals.items()},
        },
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
        ConfigError: the plan offloads nothing or everything, so that it has no threshold.
    """
    plan = study.main.plan
    if plan.threshold_tokens is None:
        raise ConfigError("--emit: this plan has no threshold: it offloads nothing, or everything")
    roles = "\n".join(
        f"# {split.cluster}: {split.num_prefill:g} prefill, {split.num_decode:g} decode" for split in plan.splits
    )
    return (
        f"# Written by prfaas-solve for {study.workload.name}.\n"
        f"# Sustains {plan.system_throughput:.3f} req/s, offloading {plan.offload_ratio:.1%} of the requests.\n"
        f"# Instances by role:\n{roles}\n"
        f"threshold_tokens: {plan.threshold_tokens}\n"
    )

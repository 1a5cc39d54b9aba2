"""The plan as settings that the manager loads."""

from __future__ import annotations

from prfaas.errors import ConfigError
from prfaas.solve.study import Study


def manager_settings(study: Study) -> str:
    """YAML for `prfaas-manager --config`: the threshold; the roles, which instances choose at their start, as comments.

    Raises:
        ConfigError: the plan has no threshold, since nothing is offloaded or everything is.
    """
    plan = study.main.plan
    if plan.threshold_tokens is None:
        raise ConfigError("--emit: this plan has no threshold: it offloads nothing, or everything")
    roles = "\n".join(
        f"# {split.cluster}: {split.num_prefill:g} prefill, {split.num_decode:g} decode" for split in plan.splits
    )
    return (
        f"# Written by prfaas-solve --method {study.method} for {study.workload.name}.\n"
        f"# Sustains {plan.system_throughput:.3f} req/s, offloading {plan.offload_ratio:.1%} of the requests.\n"
        f"# Instances by role:\n{roles}\n"
        f"threshold_tokens: {plan.threshold_tokens}\n"
    )

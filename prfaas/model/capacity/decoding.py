"""Decode capacity: the largest batch that the objective, the memory and the measured profile allow."""

import math
from dataclasses import dataclass
from typing import Literal

from prfaas.errors import ConfigError
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster

BatchLimit = Literal["slo", "memory", "profile"]
# A step that misses the objective by rounding alone meets it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class DecodeCapacity:
    """BS_max and T_decode of equation (5), and why the batch is no larger.

    `fixed_ratio` and `full_ratio` are the fixed part of a step and the largest batch's whole step over the objective.
    """

    max_batch: int
    step_seconds: float
    limit: BatchLimit
    fixed_ratio: float
    full_ratio: float

    def least_speed(self, batch: float) -> float:
        """Return the lowest decode speed at which a batch meets the objective, relative to decode alone."""
        return self.fixed_ratio + (self.full_ratio - self.fixed_ratio) * batch / self.max_batch

    def rate(self, batch: float, speed: float) -> float:
        """Return the tokens per second of a batch at some decode speed, relative to the largest batch alone."""
        return batch / self.max_batch * self.full_ratio / self.least_speed(batch) * speed if batch else 0.0

    def request_seconds(self, output_tokens: float) -> float:
        """Return instance-seconds of one average request; the inverse is Θ_pd-d for N_d = 1."""
        return self.step_seconds * output_tokens / self.max_batch


def decode_capacity(cluster: PdCluster, deployment: Deployment, workload: Workload) -> DecodeCapacity:
    """Return the decode capacity of one instance of `cluster` for this workload.

    Raises:
        ConfigError: the objective cannot be met even by a batch of one, or the cluster has no decode profile.
    """
    profile = cluster.profile.decode
    if profile is None:
        raise ConfigError(f"profile {cluster.profile.name!r} of PD cluster {cluster.name!r} has no decode part")
    context = workload.output.mean_context_tokens
    allowed = 1.0 / deployment.objectives.decode_tokens_per_second
    limits: dict[BatchLimit, float] = {
        "slo": _largest_batch(profile.base_seconds, profile.step_seconds(1, context), allowed),
        "memory": _memory_batch(cluster, deployment.model.kv_bytes(context)),
        "profile": profile.max_batch,
    }
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] < 1:
        raise ConfigError(_infeasible(cluster, limit, profile.step_seconds(1, context), context))
    batch = int(limits[limit])
    step = profile.step_seconds(batch, context)
    return DecodeCapacity(batch, step, limit, profile.base_seconds / allowed, min(1.0, step / allowed))


def _largest_batch(base: float, single: float, allowed: float) -> float:
    if allowed * (1 + _ROUNDING) < single:
        return 0.0
    return math.floor((allowed * (1 + _ROUNDING) - base) / (single - base)) if single > base else math.inf


def _memory_batch(cluster: PdCluster, request_bytes: float) -> float:
    memory = cluster.profile.kv_memory_bytes
    return math.inf if memory is None else math.floor(memory / request_bytes)


def _infeasible(cluster: PdCluster, limit: BatchLimit, step: float, context: float) -> str:
    if limit == "memory":
        return f"PD cluster {cluster.name!r}: its KV memory does not hold one request of {context:.0f} tokens"
    return f"PD cluster {cluster.name!r}: one request alone decodes at {1 / step:.1f} tok/s, below the objective"

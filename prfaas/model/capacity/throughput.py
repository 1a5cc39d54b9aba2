"""Equations (1) to (8) of the paper (arXiv 2604.15039), one function each; bytes, seconds and requests per second."""

from __future__ import annotations

import math


def kv_throughput(kv_bytes: float, prefill_seconds: float) -> float:
    """Return equation (1), Φ_kv(l) = S_kv(l) / T_prefill(l): bytes of KV per second of one prefilling instance."""
    return kv_bytes / prefill_seconds


def required_egress(num_gpus: float, gpus_per_instance: float, *, kv_bytes: float, prefill_seconds: float) -> float:
    """Return equation (2), B_out = N/P · E[S_kv] / E[T_prefill]: bytes per second of N busy GPUs of parallelism P.

    S_kv and T_prefill at the mean length give the paper's approximation N/P · Φ_kv(L_avg).
    """
    return num_gpus / gpus_per_instance * kv_throughput(kv_bytes, prefill_seconds)


def prfaas_throughput(
    num_prfaas: float, prefill_seconds: float, *, egress_bytes_per_second: float, kv_bytes: float
) -> float:
    """Return equation (3), Θ_prfaas = min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long))."""
    computed = num_prfaas / prefill_seconds if prefill_seconds else math.inf
    return min(computed, egress_bytes_per_second / kv_bytes if kv_bytes else math.inf)


def pd_prefill_throughput(num_prefill: float, prefill_seconds: float) -> float:
    """Return equation (4), Θ_pd-p = N_p / T_prefill(l_short)."""
    return num_prefill / prefill_seconds if prefill_seconds else math.inf


def pd_decode_throughput(
    num_decode: float, *, max_batch: float, step_seconds: float, output_tokens: float, append_seconds: float = 0.0
) -> float:
    """Return equation (5), Θ_pd-d = N_d · BS_max / (T_decode · L_out).

    `append_seconds` are the instance-seconds that appended later turns take from decode, per average request
    (0 in the paper).
    """
    return num_decode / (step_seconds * output_tokens / max_batch + append_seconds)


def system_throughput(
    prfaas: float, pd_prefill: float, pd_decode: float, *, offload_ratio: float, local_ratio: float
) -> float:
    """Return equation (6), Λ_max = min(Θ_prfaas / p, Θ_pd-p / (1 − p), Θ_pd-d).

    `local_ratio` is 1 − p unless some requests are prefilled on decode nodes. A stage without requests is no limit.
    """
    long = prfaas / offload_ratio if offload_ratio > 0 else math.inf
    short = pd_prefill / local_ratio if local_ratio > 0 else math.inf
    return min(long, short, pd_decode)


def prefill_imbalance(prfaas: float, pd_prefill: float, *, offload_ratio: float, local_ratio: float) -> float:
    """Return the residual of equation (7), Θ_prfaas / p − Θ_pd-p / (1 − p): 0 at the optimal threshold."""
    return prfaas / offload_ratio - pd_prefill / local_ratio


def producer_imbalance(prfaas: float, pd_prefill: float, pd_decode: float) -> float:
    """Return the residual of equation (8), Θ_prfaas + Θ_pd-p − Θ_pd-d: 0 at the optimal split."""
    return prfaas + pd_prefill - pd_decode

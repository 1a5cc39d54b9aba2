"""Equations (3) and (4) of the paper (arXiv 2604.15039); bytes, seconds and requests per second."""

from __future__ import annotations

import math


def prfaas_throughput(
    num_prfaas: float, prefill_seconds: float, *, egress_bytes_per_second: float, kv_bytes: float
) -> float:
    """Return equation (3), Θ_prfaas = min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long))."""
    computed = num_prfaas / prefill_seconds if prefill_seconds else math.inf
    return min(computed, egress_bytes_per_second / kv_bytes if kv_bytes else math.inf)


def pd_prefill_throughput(num_prefill: float, prefill_seconds: float) -> float:
    """Return equation (4), Θ_pd-p = N_p / T_prefill(l_short)."""
    return num_prefill / prefill_seconds if prefill_seconds else math.inf

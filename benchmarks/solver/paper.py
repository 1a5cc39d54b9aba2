"""Figures of the paper (arXiv 2604.15039): Tables 3 and 5, and the sizing claims of section 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prfaas.model.kv.geometry import Geometry
from prfaas.solve.files import catalog

# Table 3: Φ_kv in Gbit/s on 8 H200 at 1K, 8K, 32K and 128K tokens (K = 1024), by model of the catalog.
TABLE_3_TOKENS = (1024, 8192, 32768, 131072)
TABLE_3: Mapping[str, tuple[float, float, float, float]] = MappingProxyType({
    "Kimi-Linear-48B-A3B": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B-A17B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B-A22B": (4.12, 22.42, 33.35, 21.50),
})  # fmt: skip
TABLE_3_PROFILES: Mapping[str, str] = MappingProxyType({
    "Kimi-Linear-48B-A3B": "h200-kimi-linear",
    "MiMo-V2-Flash": "h200-mimo-v2-flash",
    "Qwen3.5-397B-A17B": "h200-qwen3.5-397b",
    "Ring-2.5-1T": "h200-ring-2.5-1t",
    "MiniMax-M2.5": "h200-minimax-m2.5",
    "Qwen3-235B-A22B": "h200-qwen3-235b",
})  # fmt: skip

# Table 6 by the fields of the JSON output of prfaas-solve. Section 4.3.1 states 13 Gbps and 49.6 %.
TABLE_6: Mapping[str, Mapping[str, float]] = MappingProxyType({
    "prfaas-pd": {
        "threshold_tokens": 19_400,
        "num_prfaas": 4,
        "num_prefill": 3,
        "num_decode": 5,
        "offload_ratio": 0.496,
        "prfaas_throughput": 1.61,
        "pd_prefill_throughput": 1.64,
        "pd_decode_throughput": 3.91,
        "system_throughput": 3.24,
        "egress_gbps": 13.0,
        "ttft_mean_seconds": 2.22,
        "ttft_p90_seconds": 3.51,
    },
    "homogeneous-pd": {
        "num_prefill": 9,
        "num_decode": 3,
        "pd_prefill_throughput": 2.11,
        "pd_decode_throughput": 2.35,
        "system_throughput": 2.11,
        "ttft_mean_seconds": 4.44,
        "ttft_p90_seconds": 9.73,
    },
    "naive-heterogeneous-pd": {
        "num_prfaas": 4,
        "num_decode": 8,
        "prfaas_throughput": 2.45,
        "pd_decode_throughput": 6.25,
        "system_throughput": 2.45,
        "ttft_mean_seconds": 1.74,
        "ttft_p90_seconds": 3.51,
    },
})  # fmt: skip

# Table 5: the case study's model on 8 H200, its lengths as Table 3's.
TABLE_5_KV_MIB = (190.8, 308.9, 701.3, 2316.3)
TABLE_5_SECONDS = (0.44, 0.72, 1.84, 7.40)
TABLE_5_GBPS = (3.61, 3.59, 3.19, 2.62)

_GBIT = 1e9 / 8
_GPUS_PER_INSTANCE = 8


@dataclass(frozen=True)
class Claim:
    """Printed figure of the paper and the model's value."""

    name: str
    printed: float
    computed: float
    unit: str
    inputs: str

    @property
    def error(self) -> float:
        """Return the relative error of the computed value."""
        return self.computed / self.printed - 1


def sizing_claims() -> list[Claim]:
    """Return section 2.3's fleet sizes and section 2.2's ratios, from geometry and the catalog's prefill times."""
    fleet = "equation (2); S_kv from config.json, T_prefill implied by Table 3"
    return [
        Claim("MiniMax-M2.5, 512 GPUs at 32K", 3.8, _fleet_gbps("MiniMax-M2.5", 512, 32768) / 1e3, "Tbps", fleet),
        Claim("Qwen3-235B, 512 GPUs at 32K", 2.1, _fleet_gbps("Qwen3-235B-A22B", 512, 32768) / 1e3, "Tbps", fleet),
        Claim("Ring-2.5-1T, 512 GPUs at 32K", 170, _fleet_gbps("Ring-2.5-1T", 512, 32768), "Gbps", fleet),
        Claim("Ring-2.5-1T, 512 GPUs at 128K, below", 100, _fleet_gbps("Ring-2.5-1T", 512, 131072), "Gbps", fleet),
        Claim("Ring-2.5-1T, 10,000 GPUs at 128K", 1.8, _fleet_gbps("Ring-2.5-1T", 10_000, 131072) / 1e3, "Tbps", fleet),
        Claim("MiniMax-M2.5 over MiMo-V2-Flash at 32K", 13, _ratio("MiniMax-M2.5", "MiMo-V2-Flash"), "times", fleet),
        Claim("Qwen3-235B over Qwen3.5-397B at 32K", 4, _ratio("Qwen3-235B-A22B", "Qwen3.5-397B-A17B"), "times", fleet),
        Claim(
            "Ring-2.5-1T against GQA in all layers",
            36,
            _ring_saving(),
            "times",
            "4.5 for MLA over GQA as printed; 8 from config.json",
        ),
    ]


def kv_throughput(kv_bytes: float, prefill_seconds: float) -> float:
    """Return equation (1), Φ_kv(l) = S_kv(l) / T_prefill(l): bytes of KV per second of one prefilling instance."""
    return kv_bytes / prefill_seconds


def required_egress(num_gpus: float, gpus_per_instance: float, *, kv_bytes: float, prefill_seconds: float) -> float:
    """Return equation (2), B_out = N/P · E[S_kv] / E[T_prefill]: bytes per second of N busy GPUs of parallelism P.

    S_kv and T_prefill at the mean length give the paper's approximation N/P · Φ_kv(L_avg).
    """
    return num_gpus / gpus_per_instance * kv_throughput(kv_bytes, prefill_seconds)


def phi(model: str, tokens: float) -> float:
    """Return Φ_kv in bytes per second from the catalog's geometry and profile."""
    geometry = catalog.find_model(model)
    profile = catalog.find_profile(TABLE_3_PROFILES[model])
    return kv_throughput(geometry.kv_bytes(tokens), profile.prefill.seconds(tokens))


def _fleet_gbps(model: str, num_gpus: int, tokens: int) -> float:
    geometry, profile = catalog.find_model(model), catalog.find_profile(TABLE_3_PROFILES[model])
    seconds = profile.prefill.seconds(tokens)
    egress = required_egress(num_gpus, _GPUS_PER_INSTANCE, kv_bytes=geometry.kv_bytes(tokens), prefill_seconds=seconds)
    return egress / _GBIT


def _ratio(dense: str, hybrid: str) -> float:
    return phi(dense, 32768) / phi(hybrid, 32768)


def _ring_saving() -> float:
    """Return bytes per token if all 80 layers were GQA, over the bytes of the ten MLA layers.

    The paper multiplies 4.5, for MLA against GQA, by 8, since one layer in eight is MLA. The configuration gives 3.6 to
    4.4 instead of 4.5, depending on the number of KV heads; the printed value is used.
    """
    ring: Geometry = catalog.find_model("Ring-2.5-1T")
    full = next(group for group in ring.groups if group.kind == "mla")
    total = sum(group.num_layers for group in ring.groups)
    return 4.5 * total / full.num_layers

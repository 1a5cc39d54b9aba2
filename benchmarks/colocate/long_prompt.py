"""The figures of one long prompt into a full batch."""

from __future__ import annotations

from benchmarks.colocate.setting import Setting
from prfaas.colocate.shape import SHAPES, prefill_flops


def long_figures(gaps: list[float], seconds: float, setting: Setting) -> dict[str, float]:
    """The prompt's seconds and rate, and the gaps between the tokens of those that decode meanwhile."""
    gaps = sorted(gaps)
    flops = prefill_flops(SHAPES[setting.shape], setting.long_prompt_tokens)
    return {
        "prefill_seconds": seconds,
        "prefill_flops_per_second": flops / seconds,
        "itl_p50_seconds": gaps[len(gaps) // 2],
        "itl_p99_seconds": gaps[int(len(gaps) * 0.99)],
        "itl_max_seconds": gaps[-1],
    }

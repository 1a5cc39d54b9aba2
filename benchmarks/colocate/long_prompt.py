"""The figures of one long prompt into a full batch."""

from __future__ import annotations

from benchmarks.colocate.setting import Setting
from prfaas.colocate.model.shape import SHAPES, ModelShape


def long_figures(gaps: list[float], seconds: float, setting: Setting) -> dict[str, float]:
    """Return the prompt's seconds and rate, and the gaps between the tokens of those that decode meanwhile."""
    gaps = sorted(gaps)
    flops = prefill_flops(SHAPES[setting.shape], setting.long_prompt_tokens)
    return {
        "prefill_seconds": seconds,
        "prefill_flops_per_second": flops / seconds,
        "itl_p50_seconds": gaps[len(gaps) // 2],
        "itl_p99_seconds": gaps[int(len(gaps) * 0.99)],
        "itl_max_seconds": gaps[-1],
    }


def prefill_flops(shape: ModelShape, num_tokens: int) -> float:
    """Floating-point operations of a prompt's matrix products: projections, feed-forward and causal attention."""
    heads = shape.num_heads * shape.head_dim
    full = shape.hidden * (2 * heads + 2 * shape.num_kv_heads * shape.head_dim)
    key, value = shape.state_heads * shape.state_key_dim, shape.state_heads * shape.state_value_dim
    linear = shape.hidden * (2 * key + 3 * value + shape.state_heads)
    ffn = 3 * shape.hidden * shape.ffn * shape.num_layers
    products = 2.0 * num_tokens * (shape.num_full * full + shape.num_linear * linear + ffn)
    return products + shape.num_full * 2.0 * num_tokens * num_tokens * heads

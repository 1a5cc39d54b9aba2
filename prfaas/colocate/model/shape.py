"""The sizes of a hybrid-attention model: gated linear attention in most layers, full attention in every fourth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full_attention", "linear_state"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; every `full_every`-th layer is full attention, the others keep a recurrent state."""

    vocab: int
    hidden: int
    num_layers: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    state_heads: int
    state_key_dim: int
    state_value_dim: int
    full_every: int = 4
    rope_theta: float = 1e6

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(
            "full_attention" if i % self.full_every == self.full_every - 1 else "linear_state"
            for i in range(self.num_layers)
        )

    @property
    def num_full(self) -> int:
        return self.kinds.count("full_attention")

    @property
    def num_linear(self) -> int:
        return self.kinds.count("linear_state")

    @property
    def kv_bytes_per_token(self) -> int:
        """Return bytes of keys and values of one token in all full-attention layers, two bytes an element."""
        return self.num_full * 2 * self.num_kv_heads * self.head_dim * 2


TINY = ModelShape(
    vocab=320,
    hidden=64,
    num_layers=4,
    ffn=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    state_heads=4,
    state_key_dim=16,
    state_value_dim=16,
)
SMALL = ModelShape(
    vocab=4096,
    hidden=512,
    num_layers=8,
    ffn=1536,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    state_heads=8,
    state_key_dim=64,
    state_value_dim=64,
)
HYBRID_8B = ModelShape(
    vocab=32768,
    hidden=4096,
    num_layers=32,
    ffn=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    state_heads=32,
    state_key_dim=128,
    state_value_dim=128,
)
SHAPES = {"tiny": TINY, "small": SMALL, "hybrid-8b": HYBRID_8B}

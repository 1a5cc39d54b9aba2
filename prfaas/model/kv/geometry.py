"""The bytes of KV that a prompt leaves behind: S_kv(l), summed over a model's KV groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prfaas.model.cost.curve import Curve, polynomial

GroupKind = Literal["full_attention", "mla", "indexer", "sliding_window", "linear_state"]


@dataclass(frozen=True)
class KVGroup:
    """The layers of one kind, summed: bytes per token that is kept, and bytes that do not depend on the length.

    `window_tokens` bounds how many tokens are kept (sliding windows); None keeps all.
    """

    kind: GroupKind
    num_layers: int
    bytes_per_token: int = 0
    state_bytes: int = 0
    window_tokens: int | None = None

    def bytes_at(self, num_tokens: float) -> float:
        """Return the group's share of S_kv."""
        kept = num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens)
        return self.state_bytes + self.bytes_per_token * kept

    def curve(self) -> Curve:
        """`bytes_at` as a curve."""
        growing = (float(self.state_bytes), float(self.bytes_per_token), 0.0)
        if self.window_tokens is None:
            return Curve((), (growing,))
        return Curve((float(self.window_tokens),), (growing, (self.bytes_at(self.window_tokens), 0.0, 0.0)))


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache for one sequence, tensor parallelism 1.

    `inferred` names what does not stand in a public configuration; it is shown wherever the geometry is used.
    """

    name: str
    groups: tuple[KVGroup, ...]
    source: str
    inferred: tuple[str, ...] = ()

    def kv_bytes(self, num_tokens: float) -> float:
        """S_kv(l) in bytes."""
        return sum(group.bytes_at(num_tokens) for group in self.groups)

    def curve(self) -> Curve:
        """S_kv as a curve in bytes."""
        total = polynomial(0.0)
        for group in self.groups:
            total = total.plus(group.curve())
        return total

    @property
    def bytes_per_token(self) -> int:
        """What each further token adds once every window is full."""
        return sum(group.bytes_per_token for group in self.groups if group.window_tokens is None)

    @property
    def constant_bytes(self) -> int:
        """States and full windows."""
        return sum(
            group.state_bytes + (0 if group.window_tokens is None else group.bytes_per_token * group.window_tokens)
            for group in self.groups
        )

"""Bytes of KV of a prompt, S_kv(l), summed over a model's KV groups."""

from dataclasses import dataclass

from prfaas.kv.kinds import kind_named
from prfaas.model.cost.curve import Curve, polynomial
from prfaas.model.kv.parameters import ModelSize


@dataclass(frozen=True)
class GroupBytes:
    """KV bytes of all layers of one kind: bytes per kept token, and bytes that do not depend on the length."""

    kind: str  # A name that `kind_named` knows.
    num_layers: int
    bytes_per_token: int = 0
    state_bytes: int = 0
    window_tokens: int | None = None

    @property
    def max_kept_tokens(self) -> int | None:
        """The most tokens whose KV is kept; None when there is no limit."""
        return kind_named(self.kind).max_kept_tokens(self.window_tokens)

    def curve(self) -> Curve:
        """Return the group's share of S_kv."""
        growing = (float(self.state_bytes), float(self.bytes_per_token), 0.0)
        limit = self.max_kept_tokens
        if limit is None or not self.bytes_per_token:
            return Curve((), (growing,))
        return Curve((float(limit),), (growing, (float(self.state_bytes + self.bytes_per_token * limit), 0.0, 0.0)))


@dataclass(frozen=True)
class Geometry:
    """KV cache of a model for one sequence with tensor parallelism 1.

    `inferred` names what no public configuration states; it is shown wherever the geometry is used. `size` is None
    where the configuration does not tell it.
    """

    name: str
    groups: tuple[GroupBytes, ...]
    source: str
    inferred: tuple[str, ...] = ()
    size: ModelSize | None = None

    def kv_bytes(self, num_tokens: float) -> float:
        """Return S_kv(l) in bytes."""
        return self.curve()(num_tokens)

    def curve(self) -> Curve:
        """Return S_kv as a curve in bytes."""
        total = polynomial(0.0)
        for group in self.groups:
            total = total.plus(group.curve())
        return total

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that each further token adds once every window is full."""
        return sum(group.bytes_per_token for group in self.groups if group.max_kept_tokens is None)

    @property
    def constant_bytes(self) -> int:
        """Return the bytes of states and full windows."""
        return sum(group.state_bytes + group.bytes_per_token * (group.max_kept_tokens or 0) for group in self.groups)

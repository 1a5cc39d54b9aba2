"""The KV group: layers of one kind that share block tables."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from prfaas.kv.kinds import KINDS
from prfaas.kv.kinds.kind import KVKind
from prfaas.kv.parts import LayerSlice, piece_of


@dataclass(frozen=True)
class KVGroup:
    """Layers of one kind that share a block table. A linear state's block is the state itself.

    Matching needs no layers, so an index and an engine's scheduler leave them out.
    """

    kind: str  # A name of `KINDS`.
    block_tokens: int
    layers: tuple[LayerSlice, ...] = ()
    window_tokens: int | None = None
    kept_states: bool = False  # In an engine: a state is at its own place in the block table, not at entry 0.

    @cached_property
    def rules(self) -> KVKind:
        """Rules of the group's kind."""
        return KINDS[self.kind]

    @property
    def is_state(self) -> bool:
        """True if the group holds one state at an exact length instead of blocks of tokens."""
        return self.rules.is_state

    @property
    def keeps_all_tokens(self) -> bool:
        """True if every token attends to all earlier ones."""
        return self.rules.keeps_all_tokens

    @cached_property
    def block_bytes(self) -> int:
        """Payload of one block over all layers of the group."""
        return sum(layer.payload_bytes for layer in self.layers)

    @cached_property
    def has_pieces(self) -> bool:
        """True if other ranks hold the other pieces of this group's blocks."""
        return any(piece_of(layer)[1] > 1 for layer in self.layers)

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the token after `num_tokens` attends to."""
        return self.rules.first_token(self, num_tokens) // self.block_tokens

    def first_kept_block(self, num_tokens: int, step_tokens: int) -> int:
        """Return the first block to keep of `num_tokens` tokens, so that the last multiple of `step_tokens` can resume."""
        return self.first_block(num_tokens - num_tokens % step_tokens)

    def state_entry(self, num_tokens: int) -> int:
        """Return the place of the state after `num_tokens` in an engine's block table."""
        return (num_tokens - 1) // self.block_tokens if self.kept_states else 0


def resume_step_tokens(groups: Iterable[KVGroup]) -> int:
    """Return the distance between lengths at which a prompt can be resumed: 1 with states, else a multiple of all blocks."""
    found = tuple(groups)
    return 1 if has_states(found) else math.lcm(*(group.block_tokens for group in found))


def has_states(groups: Iterable[KVGroup]) -> bool:
    """Return whether a prompt can be resumed only at the exact length of a stored state."""
    return any(group.is_state for group in groups)

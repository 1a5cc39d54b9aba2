"""Full attention: each token attends to all earlier tokens, so every block matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.kv.kinds.kind import KVKind

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup


class FullAttention(KVKind):
    """Blocks of all tokens from the start on, without a gap."""

    name = "full_attention"
    variants = ("mla", "indexer")  # Multi-head latent attention, and the keys by which sparse attention picks tokens.
    keeps_all_tokens = True

    def first_token(self, group: KVGroup, num_tokens: int) -> int:
        return 0

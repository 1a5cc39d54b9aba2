"""Small layouts for the tests of the pool."""

from dataclasses import replace

from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import BlockHash, Shard

SLOT_BYTES = 4096


def hybrid(model: str = "hybrid", *, slot_bytes: int = SLOT_BYTES) -> Layout:
    """Full attention in blocks of 32 tokens (group 0), linear state (1), a sliding window of 64 tokens (2)."""
    return Layout(
        model=model,
        packing="",
        shard=Shard(),
        groups=(
            KVGroup("full_attention", 32, (_layer("attention", slot_bytes),)),
            KVGroup("linear_state", 32, (_layer("state", slot_bytes),)),
            KVGroup("sliding_window", 32, (_layer("window", slot_bytes),), window_tokens=64),
        ),
    )


def divided(model: str = "divided", *, slots_per_state: int = 4) -> Layout:
    """A rank that has a piece of each block of full attention (0), a slot wide, and a state of several slots (1)."""
    attention = replace(_layer("attention", SLOT_BYTES), axis_order="head,token,kv_dim 1x32x64 1/8")
    states = _layer("state", slots_per_state * SLOT_BYTES - 100)
    groups = KVGroup("full_attention", 32, (attention,)), KVGroup("linear_state", 32, (states,))
    return Layout(model, "", Shard(1, 8), groups)


def _layer(name: str, payload_bytes: int) -> LayerSlice:
    return LayerSlice(name, 0, payload_bytes, "bfloat16", "head,token,kv_dim")


def name(number: int) -> BlockHash:
    """The hash of a block that a test calls by a number."""
    return BlockHash(number.to_bytes(16, "big"))


ROOT = name(1 << 100)

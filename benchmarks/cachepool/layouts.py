"""Layouts whose slots are as small as slots can be: only the bookkeeping is measured."""

from __future__ import annotations

from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import Shard

ATTENTION, STATE = 0, 1
SLOT_BYTES = 4096


def dense(block_tokens: int, *, slot_bytes: int = SLOT_BYTES) -> Layout:
    group = KVGroup("full_attention", block_tokens, (_layer("attention", slot_bytes),))
    return Layout("dense", "", Shard(), (group,))


def hybrid(block_tokens: int) -> Layout:
    attention = KVGroup("full_attention", block_tokens, (_layer("attention"),))
    return Layout("hybrid", "", Shard(), (attention, KVGroup("linear_state", block_tokens, (_layer("state"),))))


def _layer(name: str, slot_bytes: int = SLOT_BYTES) -> LayerSlice:
    return LayerSlice(name, 0, slot_bytes, "bfloat16", "head,token,kv_dim")

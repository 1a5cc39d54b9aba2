"""Paged keys and values of the full-attention layers, and the recurrent states of the linear ones.

Block 0 and state slot 0 are scratch: rows of a decode batch that hold no request read and write there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prfaas.colocate.device.memory import DTYPES
from prfaas.colocate.model.shape import ModelShape


@dataclass(frozen=True)
class CacheShape:
    num_blocks: int
    block_tokens: int
    num_state_slots: int

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True)
class Cache:
    """kv [full layer, key or value, block, token, head, dim]; states [linear layer, slot, head, key, value]."""

    kv: torch.Tensor
    states: torch.Tensor
    block_tokens: int


def _kv_size(model: ModelShape, cache: CacheShape) -> tuple[int, ...]:
    return (model.num_full, 2, cache.num_blocks, cache.block_tokens, model.num_kv_heads, model.head_dim)


def _state_size(model: ModelShape, cache: CacheShape) -> tuple[int, ...]:
    return (model.num_linear, cache.num_state_slots, model.state_heads, model.state_key_dim, model.state_value_dim)


def kv_elements(model: ModelShape, cache: CacheShape) -> int:
    return math.prod(_kv_size(model, cache))


def state_elements(model: ModelShape, cache: CacheShape) -> int:
    return math.prod(_state_size(model, cache))


def num_bytes(model: ModelShape, cache: CacheShape, dtype: str) -> int:
    """Return the bytes of keys, values and states."""
    kv: int = DTYPES[dtype].itemsize
    states: int = DTYPES[state_dtype(dtype)].itemsize
    return kv * kv_elements(model, cache) + states * state_elements(model, cache)


def state_dtype(dtype: str) -> str:
    """Return the dtype of linear states beside KV of `dtype`. States are sums over thousands of tokens."""
    return "float32" if dtype == "bfloat16" else dtype


def view(model: ModelShape, cache: CacheShape, kv: torch.Tensor, states: torch.Tensor) -> Cache:
    """Return the cache as views of two flat buffers; valid as long as they are."""
    return Cache(kv.view(_kv_size(model, cache)), states.view(_state_size(model, cache)), cache.block_tokens)

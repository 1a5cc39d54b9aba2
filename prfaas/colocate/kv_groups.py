"""Needs of the prefill worker by kind of KV group."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.colocate.prefill_plan import GroupShape
from prfaas.errors import LayoutError


def group_shapes(kv_cache_config: Any) -> tuple[GroupShape, ...]:
    """Return the groups of a KV cache.

    Raises:
        LayoutError: A group is of an unknown kind.
    """
    return tuple(_group_shape(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _group_shape(spec: Any) -> GroupShape:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MambaSpec):
        return GroupShape(spec.block_size, is_state=True)
    if isinstance(spec, SlidingWindowSpec):
        return GroupShape(spec.block_size, window_tokens=spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupShape(spec.block_size, window_tokens=spec.attention_chunk_size)
    if isinstance(spec, FullAttentionSpec):
        return GroupShape(spec.block_size)
    raise LayoutError(f"colocation does not know KV groups of the kind {type(spec).__name__}")

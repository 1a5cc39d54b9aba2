"""vLLM's KV cache as a layout: iterates the groups, never assumes one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.connector.block_lists import GroupShape
from prfaas.errors import LayoutError
from prfaas.types import Shard

_ATTENTION_AXES = "head,token,kv_dim"
_LATENT_AXES = "token,latent_dim"
_STATE_AXES = "state_bytes"


def group_shapes(config: KVCacheConfig) -> tuple[GroupShape, ...]:
    """Kind, block size and window of each group that may be transferred.

    Raises:
        LayoutError: a group is of a kind that this version cannot move; it is named.
    """
    return tuple(_shape(group.kv_cache_spec) for group in config.transfer_groups)


def _shape(spec: KVCacheSpec) -> GroupShape:
    spec = _uniform(spec)
    kind = type(spec)  # a subclass may mean other bytes, so equality and not inheritance decides
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return GroupShape("full_attention", spec.block_size)
    if kind is SlidingWindowSpec:
        assert isinstance(spec, SlidingWindowSpec)
        return GroupShape("sliding_window", spec.block_size, spec.sliding_window + spec.extra_retained_tokens)
    if kind is MambaSpec:
        assert isinstance(spec, MambaSpec)
        if spec.num_speculative_blocks:
            raise LayoutError("speculative decoding with a recurrent state is not supported: its state has several blocks")
        return GroupShape("linear_state", spec.block_size)
    raise LayoutError(f"KV cache group of kind {kind.__name__} is not supported by this version of prfaas")


def _uniform(spec: KVCacheSpec) -> KVCacheSpec:
    """The one spec that a group of like layers stands for."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    inner = list(spec.kv_cache_specs.values())
    if len({(type(one), one.block_size) for one in inner}) != 1:
        raise LayoutError("a KV cache group mixes kinds of layers; that is not supported by this version of prfaas")
    return inner[0]


def layer_groups(config: KVCacheConfig) -> dict[str, tuple[int, int]]:
    """For each layer its (group, place in the group), in the layout's counting."""
    return {
        name: (index, place)
        for index, group in enumerate(config.transfer_groups)
        for place, name in enumerate(group.layer_names)
    }


def block_rows(name: str, cache: torch.Tensor, *, num_blocks: int) -> torch.Tensor:
    """One layer's cache as bytes of shape [block, payload byte], a view.

    The first axis of `cache` counts kernel blocks, a whole number of which make one block; what follows is contiguous.

    Raises:
        LayoutError: the tensor is laid out otherwise.
    """
    rows, rest = divmod(cache.shape[0], num_blocks)
    if rest or not rows or not cache[0].is_contiguous():
        raise LayoutError(f"layer {name}: a tensor of shape {tuple(cache.shape)} is not a row per block")
    item = cache.element_size()
    payload = cache[0].numel() * item
    stride = cache.stride(0) * item
    if rows > 1 and stride != payload:
        raise LayoutError(f"layer {name}: padding between the kernel blocks of one block is not supported")
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(
        cache.untyped_storage(), cache.storage_offset() * item, (num_blocks, rows * payload), (rows * stride, 1)
    )
    return flat


def make_layout(
    config: KVCacheConfig, rows: Mapping[str, torch.Tensor], *, model: str, shard: Shard, dtypes: Mapping[str, str]
) -> Layout:
    """The layout of one rank; `rows` are the layers as `block_rows` shows them, `dtypes` their element types."""
    shapes = group_shapes(config)
    groups = tuple(
        _group(shape, _uniform(group.kv_cache_spec), group.layer_names, rows, shard, dtypes)
        for shape, group in zip(shapes, config.transfer_groups, strict=True)
    )
    device = next(iter(rows.values())).device.type
    return Layout(model=model, packing=_packing(device, config), shard=shard, groups=groups)


def _group(
    shape: GroupShape,
    spec: KVCacheSpec,
    names: Sequence[str],
    rows: Mapping[str, torch.Tensor],
    shard: Shard,
    dtypes: Mapping[str, str],
) -> KVGroup:
    num_heads = int(getattr(spec, "num_kv_heads", 1))
    axes = _STATE_AXES if isinstance(spec, MambaSpec) else _LATENT_AXES if isinstance(spec, MLAAttentionSpec) else _ATTENTION_AXES
    layers, offset = [], 0
    for name in names:
        payload = rows[name].shape[1]
        layers.append(
            LayerSlice(
                name=name,
                offset_bytes=offset,
                payload_bytes=payload,
                dtype=dtypes[name],
                axis_order=axes,
                first_head=shard.rank * num_heads,
                num_heads=num_heads,
            )
        )
        offset += payload
    return KVGroup(shape.kind, shape.block_tokens, tuple(layers), shape.window_tokens)


def _packing(device: str, config: KVCacheConfig) -> str:
    """How this machine's kernels pack a block: on a CPU that depends on its instruction set, states on the convolution's layout."""
    release = ".".join(str(vllm.__version__).split(".")[:2])
    parts = [f"vllm {release}", device, str(config.kv_cache_layout)]
    if device == "cpu":
        parts.append(torch.backends.cpu.get_cpu_capability())
    parts.append(os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "default"))
    return " ".join(parts)


def refuse_unsupported(vllm_config: Any) -> None:
    """Stop the start of an engine whose KV this version cannot move.

    Raises:
        LayoutError: pipeline or decode context parallelism, or speculative decoding, is on.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise LayoutError("pipeline parallelism is not supported by this version of prfaas")
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise LayoutError("decode context parallelism is not supported by this version of prfaas")
    if vllm_config.speculative_config is not None:
        raise LayoutError("speculative decoding is not supported by this version of prfaas")

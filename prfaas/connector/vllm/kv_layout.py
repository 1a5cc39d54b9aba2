"""Layout of the KV caches that vLLM has allocated, in a form that two machines can compare."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from prfaas.connector.block_map import BlockMap
from prfaas.connector.vllm.checks import Judgement, Limit, accept, check_fields, only
from prfaas.connector.worker.copy_host import LayerBlocks, pages_of, physical_axes
from prfaas.errors import LayoutError
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.group import KVGroup
from prfaas.kv.kinds import KINDS
from prfaas.kv.layout import Layout
from prfaas.kv.parts import SHARED_HEADS, UNKNOWN_HEADS, LayerSlice
from prfaas.types import Shard


@dataclass(frozen=True)
class SpecRule:
    """KV kind of a spec of vLLM, judgement of its fields, and name of the field with its window."""

    kind: str
    fields: Judgement
    window: str = ""


_SPEC = accept("block_size dcp_sharded block_stride_alignment is_draft")
# Shapes, dtypes and order of the bytes are part of the layout, which both sides compare.
_ATTENTION = _SPEC | accept("""max_tp_shards num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded
    num_head_slots state_content_bytes""")
_ATTENTION |= {"tokens_per_state": only(1, reason="the end of a block is not the end of a state")}
_FULL = _ATTENTION | {
    "sliding_window": None,  # vLLM keeps all blocks of such a layer.
    "attention_chunk_size": None,  # So it does here.
    "non_causal": only(False, reason="the KV of a prompt depends on its last token, which does not travel"),
}
_MLA = _FULL | accept("""cache_dtype_str alignment model_version cache_role is_index_group_leader topk_buffer_width
    non_causal_multi_token_decode""")
_WINDOW = _ATTENTION | {
    "sliding_window": None,
    "extra_retained_tokens": only(0, reason="a resumption would need a longer window"),
}
_STATE = _SPEC | accept("""shapes dtypes page_size_padded mamba_type num_heads tokens_per_state tp_replicated
    num_prefill_checkpoint_blocks prefill_checkpoint_alignment""")
_STATE |= {
    "mamba_cache_mode": only("none", "align", reason="the place of a state in the block table is not known"),
    "num_speculative_blocks": None,  # They follow the block of the running state, the only one that is copied.
}
# Matched by exact type: an unknown subclass may keep different blocks.
_RULES: dict[type[KVCacheSpec], SpecRule] = {
    FullAttentionSpec: SpecRule("full_attention", _FULL),
    MLAAttentionSpec: SpecRule("full_attention", _MLA),
    SlidingWindowSpec: SpecRule("sliding_window", _WINDOW, window="sliding_window"),
    ChunkedLocalAttentionSpec: SpecRule(
        "chunked_local", _ATTENTION | {"attention_chunk_size": None}, window="attention_chunk_size"
    ),
    MambaSpec: SpecRule("linear_state", _STATE),
}
_ON_HOST = "blocks on the host are not copied"
JUDGED_CACHES: dict[str, Judgement] = {kind.__name__: rule.fields for kind, rule in _RULES.items()} | {
    "UniformTypeKVCacheSpecs": _SPEC | accept("kv_cache_specs"),
    "KVCacheGroupSpec": accept("layer_names kv_cache_spec enable_kv_transfer is_eagle_group")
    | {
        "host_resident": only(False, reason="the blocks are not on the device"),
        "role": Limit(lambda role: role.value == "default", "the group holds copies of other blocks"),
    },
    "KVCacheConfig": accept("""num_blocks kv_cache_tensors kv_cache_groups prefix_cache_retention_interval
        kv_cache_layout hash_block_size cache_hit_alignment_tokens kv_tp_replicas""")
    | {
        "hisparse_host_num_blocks": only(None, reason=_ON_HOST),
        "hisparse_host_block_stride": only(None, reason=_ON_HOST),
        "hisparse_shared_host_pool": only(False, reason=_ON_HOST),
    },
}
_HEADS = re.compile("(kv|key_value)_heads|kv_n_heads|n_head_kv|num_attention_groups")
_PLAIN_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
# Backends that store, for a head and token, the key and then the value, or the latent of MLA. Axes and dtype tell the rest.
_PLAIN_NAMES = """FLASH_ATTN FLASH_ATTN_DIFFKV FLASHINFER FLEX_ATTENTION TRITON_ATTN TRITON_ATTN_DIFFKV TRITON_FLASH_ATTN
    TRITON_FLASHINFER CUTLASS_MLA FLASHINFER_MLA FLASHMLA FLASH_ATTN_MLA TOKENSPEED_MLA TRITON_MLA"""
PLAIN_BACKENDS = frozenset(_PLAIN_NAMES.split())
_PLAIN_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Rank:
    """Share of a tensor-parallel engine's KV. Ranks with equal KV have the same share.

    Beside states that differ, `num_pieces` consecutive ranks have equal attention, and divide its blocks among them.
    """

    model: str  # Identity of the weights.
    shard: Shard
    kv_head_counts: Collection[int]  # Of layers of the whole model.
    num_pieces: int = 1


def without_drafts(config: KVCacheConfig, num_target_layers: int) -> KVCacheConfig:
    """Return a cache without the layers of a draft model. vLLM numbers them after the target's, or names their model."""
    groups = []
    for group in config.kv_cache_groups:
        names = [name for name in group.layer_names if not _is_draft(name, num_target_layers)]
        groups.append(replace(group, layer_names=names, enable_kv_transfer=group.enable_kv_transfer and bool(names)))
    return replace(config, kv_cache_groups=groups)


def _is_draft(name: str, num_target_layers: int) -> bool:
    parts = name.split(".")
    is_named = any(part.startswith(("mtp", "draft_model")) for part in parts)
    return is_named or any(part.isdigit() and int(part) >= num_target_layers for part in parts)


def kv_head_counts(model: Any) -> set[int]:
    """Return all numbers of KV heads that a ModelConfig of vLLM names. Windows may have more than full attention."""
    return {model.get_total_num_kv_heads(), *_head_counts(model.hf_text_config.to_dict())}


def _head_counts(settings: Mapping[Any, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _head_counts(value)
        elif _HEADS.search(str(name)):
            yield from (number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int))


class EqualRanks(NamedTuple):
    """Numbers of consecutive tensor-parallel ranks that have equal KV: in every layer, and in every layer of attention."""

    in_all_layers: int
    in_attention: int


def count_equal_ranks(config: KVCacheConfig, *, num_ranks: int, kv_head_counts: Collection[int]) -> EqualRanks:
    """Return how many ranks have equal KV.

    vLLM repeats the latents of MLA on all ranks, and the heads of a model with fewer heads than ranks.
    """
    groups = [config.kv_cache_groups[index] for index in config.transfer_group_ids]
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    attention = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    found = [[_num_equal_ranks(spec, num_ranks, kv_head_counts) for spec in some] for some in (specs, attention)]
    return EqualRanks(math.gcd(num_ranks, *found[0]), math.gcd(num_ranks, *found[1]))


def _num_equal_ranks(spec: Any, num_ranks: int, kv_head_counts: Collection[int]) -> int:
    if isinstance(spec, MambaSpec):
        return num_ranks if spec.tp_replicated else 1
    is_latent = isinstance(spec, MLAAttentionSpec)
    num_shares = spec.max_tp_shards or (None if is_latent else _total_heads(spec, num_ranks, kv_head_counts))
    return max(1, num_ranks // (num_shares or num_ranks))


def _total_heads(spec: Any, num_ranks: int, kv_head_counts: Collection[int]) -> int | None:
    """Return the KV heads of a layer over all ranks, or None if several numbers leave one head to a rank."""
    if num_ranks == 1 or spec.num_kv_heads > 1:
        return int(spec.num_kv_heads * num_ranks)
    fitting = [number for number in kv_head_counts if number <= num_ranks]
    return fitting[0] if len(fitting) == 1 else None


def block_map(config: KVCacheConfig) -> BlockMap:
    """Return the transferable groups as the scheduler side needs them.

    Raises:
        LayoutError: A group is of an unknown kind.
    """
    return BlockMap(tuple(_engine_group(index, config.kv_cache_groups[index]) for index in config.transfer_group_ids))


def _engine_group(index: int, group: KVCacheGroupSpec) -> KVGroup:
    spec = _only_spec(index, group)
    kind = _RULES[type(spec)].kind
    if KINDS[kind].is_state:
        return KVGroup(kind, spec.block_size, kept_states=spec.mamba_cache_mode != "none")
    if spec.block_size % HASH_UNIT_TOKENS:
        raise LayoutError(f"KV group {index}: blocks of {spec.block_size} tokens, not a multiple of {HASH_UNIT_TOKENS}")
    return KVGroup(kind, spec.block_size, window_tokens=_window(spec))


def has_one_attention(config: KVCacheConfig) -> bool:
    """Return whether all groups are recurrent states or full attention of one spec.

    In such an engine the locally cached attention tells what all groups except the states hold. Sliding windows, or a
    second kind of attention, may hold less, and the connector would not load what they lack.
    """
    groups, indices = config.kv_cache_groups, config.transfer_group_ids
    found = [_engine_group(index, groups[index]) for index in indices]
    attention = [groups[index].kv_cache_spec for index, group in zip(indices, found, strict=True) if not group.is_state]
    is_whole = len(found) == len(groups) and all(group.is_state or group.keeps_all_tokens for group in found)
    return is_whole and 0 < len(attention) < len(found) and all(spec == attention[0] for spec in attention)


def _only_spec(index: int, group: KVCacheGroupSpec) -> Any:
    """Return the spec that all layers of a group share, except for page sizes."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if unknown := {type(spec).__name__ for spec in specs if type(spec) not in _RULES}:
        known = ", ".join(sorted(kind.__name__ for kind in _RULES))
        raise LayoutError(f"KV group {index}: this connector does not know {', '.join(unknown)} (it knows {known})")
    shapes = {(type(spec), spec.block_size, _window(spec)) for spec in specs}
    if len(shapes) != 1:
        raise LayoutError(f"KV group {index}: layers of different kinds share blocks: {sorted(map(str, shapes))}")
    return specs[0]


def _window(spec: Any) -> int | None:
    rule = _RULES[type(spec)]
    return getattr(spec, rule.window) if rule.window else None


def check_cache(config: KVCacheConfig, *, accepts_untested: bool) -> None:
    """Refuse a cache with a group that cannot be transferred. Groups that vLLM keeps to itself are left out.

    Raises:
        ConfigError: The message names class and field.
    """
    check_fields(config, JUDGED_CACHES["KVCacheConfig"], accepts_untested=accepts_untested)
    for index in config.transfer_group_ids:
        group = config.kv_cache_groups[index]
        specs: Iterable[Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()
        for part in (group, group.kv_cache_spec, *specs):
            if judgement := JUDGED_CACHES.get(type(part).__name__):  # `block_map` refuses groups of other kinds.
                check_fields(part, judgement, accepts_untested=accepts_untested)


def describe(
    config: KVCacheConfig, caches: Mapping[str, torch.Tensor], rank: Rank, *, packing: str
) -> tuple[Layout, dict[str, LayerBlocks]]:
    """Return the layout of this rank, and the blocks of each layer. Layers that share the cache of another are left out.

    Raises:
        LayoutError: A group is of an unknown kind, or the bytes of a block are scattered.
    """
    groups: list[KVGroup] = []
    layers: dict[str, LayerBlocks] = {}
    for position, index in enumerate(config.transfer_group_ids):
        group = config.kv_cache_groups[index]
        engine = _engine_group(index, group)
        is_overwritten = engine.is_state and not engine.kept_states
        found = _group_layers(config, group, caches, rank, position=position, is_overwritten=is_overwritten)
        layers |= found
        block_tokens = HASH_UNIT_TOKENS if engine.is_state else engine.block_tokens
        slices = tuple(layer.slice for layer in found.values())
        groups.append(KVGroup(engine.kind, block_tokens, slices, engine.window_tokens))
    return Layout(rank.model, packing, rank.shard, tuple(groups)), layers


def _group_layers(
    config: KVCacheConfig,
    group: KVCacheGroupSpec,
    caches: Mapping[str, torch.Tensor],
    rank: Rank,
    *,
    position: int,
    is_overwritten: bool,
) -> dict[str, LayerBlocks]:
    layers: dict[str, LayerBlocks] = {}
    offset, seen = 0, set()
    for name in group.layer_names:
        cache = caches.get(name)
        if cache is None:
            raise LayoutError(f"layer {name} has no registered KV cache")
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        pages = pages_of(name, cache, config.num_blocks)
        spec = _spec_of(group, name)
        slice_ = _slice(name, cache, spec, rank, offset=offset, size=pages.shape[1])
        if _is_divided(spec, rank):
            number, size = rank.shard.rank % rank.num_pieces, slice_.payload_bytes // rank.num_pieces
            order = f"{slice_.axis_order} {number}/{rank.num_pieces}"
            slice_, pages = replace(slice_, payload_bytes=size, axis_order=order), pages.narrow(1, number * size, size)
        layers[name] = LayerBlocks(position, len(layers), slice_, pages, is_overwritten)
        offset += slice_.payload_bytes
    return layers


def _is_divided(spec: Any, rank: Rank) -> bool:
    """Return whether each of the ranks with equal blocks of this layer stores and sends a piece: some of the tokens."""
    if rank.num_pieces == 1 or isinstance(spec, MambaSpec) or _shares_heads(spec):
        return False
    return (_heads(spec, rank) or (0, 0))[1] == 1 and spec.block_size % rank.num_pieces == 0


def _spec_of(group: KVCacheGroupSpec, name: str) -> Any:
    specs: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return specs.get(name, group.kv_cache_spec)


def _slice(name: str, cache: torch.Tensor, spec: Any, rank: Rank, *, offset: int, size: int) -> LayerSlice:
    if isinstance(spec, MambaSpec):
        shapes = " ".join("x".join(map(str, shape)) for shape in spec.shapes)
        dtype = " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        return LayerSlice(name, offset, size, dtype, f"{spec.mamba_type.name.lower()} {shapes}")
    heads = _heads(spec, rank)
    head_axis = SHARED_HEADS if _shares_heads(spec) else "head" if heads else UNKNOWN_HEADS
    attention = (head_axis, "token", "content")
    axes = attention if cache.dim() == 1 + len(attention) else ("kernel_block", *attention)
    if cache.dim() != 1 + len(axes):
        raise LayoutError(f"layer {name}: a KV cache with {cache.dim()} axes is not known")
    order = f"{physical_axes(cache, axes)} {'x'.join(map(str, cache.shape[1:]))}"
    first, count = heads or (0, int(spec.num_kv_heads))
    return LayerSlice(name, offset, size, str(cache.dtype).removeprefix("torch."), order, first, count)


def _shares_heads(spec: Any) -> bool:
    """Return whether the bytes of a head are spread over its block, so that ranks cannot divide the block by heads."""
    if isinstance(spec, MLAAttentionSpec):
        return False
    return spec.num_head_slots is not None or spec.kv_quant_mode not in _PLAIN_MODES


def _heads(spec: Any, rank: Rank) -> tuple[int, int] | None:
    """Return the first KV head of this rank and their number: a share, or a replica if there are fewer heads than ranks.

    Return None if they are not known.
    """
    if isinstance(spec, MLAAttentionSpec):
        return 0, 1
    total = _total_heads(spec, rank.shard.size, rank.kv_head_counts)
    return None if total is None else (rank.shard.rank * total // rank.shard.size, int(spec.num_kv_heads))


def packing(
    layers: Mapping[str, Any], names: Sequence[str], *, cache_dtype: str, device: torch.device, assumes_plain: bool
) -> str:
    """Return a text that is equal on two machines if their kernels arrange the bytes of a block alike.

    It names the vLLM release, device, attention backends by what they store, and state order. `layers` are vLLM's
    attention modules by name. CPU kernels arrange keys for their instruction set, so processors with different ones cannot
    exchange bytes. `assumes_plain` holds every attention backend for plain.
    """
    is_plain_dtype = cache_dtype in _PLAIN_DTYPES and device.type != "cpu"
    backends = {_backend(layers[name], is_plain_dtype, assumes_plain) for name in names if name in layers}
    release = ".".join(str(vllm.__version__).split(".")[:2])
    fp8 = " fnuz" if cache_dtype.startswith("fp8") and current_platform.is_fp8_fnuz() else ""
    processor = [f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"] if device.type == "cpu" else []
    storage = [f"kv_cache_dtype={cache_dtype}{fp8}", f"conv={os.environ.get('VLLM_SSM_CONV_STATE_LAYOUT', 'SD')}"]
    return "; ".join([f"vllm {release}", device.type, *processor, *sorted(backends), *storage])


def _backend(layer: Any, is_plain_dtype: bool, assumes_plain: bool) -> str:
    backend = layer.get_attn_backend()
    name: str = backend.get_name()
    kinds = {kind.__name__ for kind in backend.__mro__}  # ROCM_AITER_FA, too, calls itself FLASH_ATTN.
    is_plain = name in PLAIN_BACKENDS and AttentionBackendEnum[name].value.rpartition(".")[2] in kinds
    if is_plain_dtype and (is_plain or (assumes_plain and not backend.is_ssm())):
        return "plain"
    instructions = getattr(layer, "isa", None)
    return f"{name}/{instructions}" if instructions else name

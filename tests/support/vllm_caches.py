"""vLLM's own cache specs, and tensors laid out as it registers them."""

from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

NUM_BLOCKS = 8


def attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16, **changes}
    )


def latent(block_size: int = 32) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)


def state(kind: MambaAttentionBackendEnum, *shapes: tuple[int, ...], **changes: Any) -> MambaSpec:
    dtypes = (torch.bfloat16,) * (len(shapes) - 1) + (torch.float32,)
    return MambaSpec(block_size=4096, shapes=shapes, dtypes=dtypes, mamba_type=kind, **changes)


def config_of(*groups: tuple[list[str], KVCacheSpec], num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec) for names, spec in groups])


def caches_of(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Tensors as vLLM registers them: attention [block, head, token, content], states [block, 1, 1, byte]."""
    caches = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            if isinstance(spec, MambaSpec):
                caches[name] = torch.zeros(config.num_blocks, 1, 1, spec.state_content_size_bytes, dtype=torch.int8)
            else:
                content = spec.state_content_size_bytes // spec.dtype.itemsize
                caches[name] = torch.zeros(
                    config.num_blocks, spec.num_heads, spec.num_states, content, dtype=spec.dtype
                )
    return caches


KDA = state(MambaAttentionBackendEnum.GDN_ATTN, (3, 96), (4, 32, 32))
LIGHTNING = state(MambaAttentionBackendEnum.LINEAR, (4, 64, 64))

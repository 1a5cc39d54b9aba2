"""Attention over blocks: the form for GPUs takes and gives the shapes of the other one, and is chosen where it can run."""

from __future__ import annotations

import pytest
import torch

from prfaas.colocate.model.attention import in_place, reads_in_place
from prfaas.colocate.model.cache import Cache


def cache_on(device: str, dtype: torch.dtype, block_tokens: int) -> Cache:
    kv = torch.empty(1, 2, 3, block_tokens, 2, 8, dtype=dtype, device=device)
    return Cache(kv, torch.empty(0), block_tokens)


@pytest.mark.parametrize(("dtype", "block_tokens"), [(torch.bfloat16, 256), (torch.bfloat16, 16), (torch.float64, 256)])
def test_without_a_gpu_blocks_are_gathered(dtype: torch.dtype, block_tokens: int) -> None:
    assert not reads_in_place(cache_on("cpu", dtype, block_tokens))


@pytest.mark.parametrize(("num_sequences", "max_queries"), [(5, 1), (1, 40)])
def test_torch_takes_block_tables_as_we_give_them(num_sequences: int, max_queries: int) -> None:
    """On the meta device: torch checks names, heads and shapes and computes nothing."""
    cache = cache_on("meta", torch.bfloat16, 256)
    q = torch.empty(num_sequences * max_queries, 4, 8, dtype=torch.bfloat16, device="meta")
    out = in_place(
        q,
        cache.kv[0, 0],
        cache.kv[0, 1],
        starts=torch.empty(num_sequences + 1, dtype=torch.int32, device="meta"),
        max_queries=max_queries,
        lengths=torch.empty(num_sequences, dtype=torch.int64, device="meta"),
        tables=torch.empty(num_sequences, 2, dtype=torch.int64, device="meta"),
    )
    assert out.shape == q.shape and out.dtype == q.dtype

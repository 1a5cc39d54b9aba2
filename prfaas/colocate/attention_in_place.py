"""Full attention over paged keys and values in place: torch's flash attention follows the block tables."""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn

CAUSAL = (-1, 0)  # varlen_attn's window, aligned to the last query and the last key


def in_place(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    starts: torch.Tensor,
    max_queries: int,
    lengths: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    """Flash attention over `keys`, `values` [block, token, head, dim] through `tables` [sequence, block].

    Sequence i has the queries q[starts[i] : starts[i + 1]], the last ones of its `lengths[i]` tokens.
    """
    out: torch.Tensor = varlen_attn(
        q,
        keys,
        values,
        starts,
        None,
        max_queries,
        tables.shape[1] * keys.shape[1],
        window_size=CAUSAL,
        enable_gqa=True,
        seqused_k=lengths.to(torch.int32),
        block_table=tables.to(torch.int32),
    )
    return out

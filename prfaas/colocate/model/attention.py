"""Full attention over paged keys and values in place: torch's flash attention follows the block tables."""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from prfaas.colocate.model.cache import Cache

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


# A GPU's kernels, which load torch's compiler: with them each process of an executor takes twice the time to start.
if torch.version.cuda or torch.version.hip:
    from torch.nn.attention.bias import causal_lower_right

    from prfaas.colocate.model.attention import in_place
else:

    def causal_lower_right(num_queries: int, num_keys: int) -> torch.Tensor:
        """Return which keys each of the last queries sees: those up to itself."""
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [token, head, dim] each, keys and values with fewer heads
IN_PLACE_BLOCK_TOKENS = 256


def reads_in_place(cache: Cache) -> bool:
    """Return whether flash attention can follow this cache's block tables. Not run on a GPU."""
    fits = cache.kv.element_size() == 2 and cache.block_tokens % IN_PLACE_BLOCK_TOKENS == 0
    return fits and cache.kv.device.type == "cuda"


def attend_rows(cache: Cache, layer: int, qkv: QKV, *, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return each row's token at `positions` [row] against its blocks `tables` [row, block], itself included: [row, head, dim].

    Writes its key and value. Shapes are static, so that a CUDA graph can hold it.
    """
    q, k, v = qkv
    block = tables.gather(1, (positions // cache.block_tokens)[:, None])[:, 0]
    _write(cache, layer, (block, positions % cache.block_tokens), k, v)
    keys, values = cache.kv[layer, 0], cache.kv[layer, 1]
    if reads_in_place(cache):
        starts = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32)
        return in_place(q, keys, values, starts=starts, max_queries=1, lengths=positions + 1, tables=tables)
    return _gathered_rows(q, keys, values, positions=positions, tables=tables)


def attend_prompt(cache: Cache, layer: int, qkv: QKV, *, start: int, table: torch.Tensor) -> torch.Tensor:
    """A prompt's tokens from position `start` on, against themselves and what the blocks hold before: [token, head, dim].

    Writes their keys and values.
    """
    q, k, v = qkv
    end = start + len(q)
    at = torch.arange(start, end, device=q.device)
    _write(cache, layer, (table[at // cache.block_tokens], at % cache.block_tokens), k, v)
    if start and reads_in_place(cache):
        starts, lengths = torch.tensor([[0, len(q)], [end, 0]], device=q.device, dtype=torch.int32)
        keys, values = cache.kv[layer, 0], cache.kv[layer, 1]
        return in_place(q, keys, values, starts=starts, max_queries=len(q), lengths=lengths[:1], tables=table[None])
    if start:
        used = table[: -(-end // cache.block_tokens)]
        k, v = (cache.kv[layer, half][used].flatten(0, 1)[:end] for half in (0, 1))
    queries, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
    if start:
        mask = causal_lower_right(len(q), end)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    else:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _write(
    cache: Cache, layer: int, where: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor
) -> None:
    cache.kv[layer, 0].index_put_(where, k)
    cache.kv[layer, 1].index_put_(where, v)


def _gathered_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, positions: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    keys, values = (part[tables].flatten(1, 2).transpose(1, 2) for part in (keys, values))
    visible = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    # The queries that share a key head are its "tokens": no key is repeated in memory.
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [row, kv head, query of the head, dim]
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None])
    return out.flatten(1, 2)

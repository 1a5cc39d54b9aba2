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


CHUNK_TOKENS = 64  # tokens whose scores are computed against each other; states pass between chunks


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per request: q, k [batch, head, key], v [batch, head, value], log_decay [batch, head].

    `state` is [batch, head, key, value]. Returns the output [batch, head, value] and the new state, both in the state's dtype.
    """
    q, k, v = (part.to(state.dtype) for part in (q, k, v))
    decay = log_decay.to(state.dtype).exp()[..., None, None]
    state = state * decay + k[..., :, None] * v[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def chunkwise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all tokens of one request: q, k [token, head, key], v [token, head, value], log_decay [token, head].

    `state` is [head, key, value]. Returns the outputs [token, head, value] in v's dtype and the state after the last
    token. No loop over chunks: the state before chunk c is a sum over the chunks before it, weighted by the decay in
    between, which is one product.
    """
    num_tokens = q.shape[0]
    q, k, v = (_chunks(part) for part in (q, k, v))  # [head, chunk, token, key or value]
    decay = _chunks(log_decay.to(state.dtype)[..., None])[..., 0].cumsum(-1)  # [head, chunk, token]
    before, after = _states(k, v, decay, state)
    within = (decay[..., :, None] - decay[..., None, :]).tril_().exp_().tril_()
    scores = (q @ k.transpose(-1, -2)) * within.to(q.dtype)
    out = scores @ v + (q * decay.exp()[..., None].to(q.dtype)) @ before.to(q.dtype)
    return out.flatten(1, 2)[:, :num_tokens].transpose(0, 1), after


def _states(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states [head, chunk, key, value] before each chunk, and the one after the last."""
    to_end = (decay[..., -1:] - decay).exp()[..., None]
    added = (k * to_end.to(k.dtype)).transpose(-1, -2) @ v  # what each chunk adds, seen from its end
    ends = torch.nn.functional.pad(
        decay[..., -1].cumsum(-1), (1, 0)
    )  # [head, chunk + 1]: log decay up to each boundary
    weights = (ends[:, :, None] - ends[:, None, :]).tril_().exp_().tril_()  # [head, boundary, boundary]
    sources = torch.cat((state[:, None], added.to(state.dtype)), 1)  # what enters at each boundary
    at = (weights @ sources.flatten(2)).view(sources.shape)
    return at[:, :-1], at[:, -1]


def _chunks(part: torch.Tensor) -> torch.Tensor:
    """[token, head, x] as [head, chunk, token, x]; the added tokens are zero, so they neither decay nor add."""
    padded = torch.nn.functional.pad(part.transpose(0, 1), (0, 0, 0, -part.shape[0] % CHUNK_TOKENS))
    return padded.unflatten(1, (-1, CHUNK_TOKENS))

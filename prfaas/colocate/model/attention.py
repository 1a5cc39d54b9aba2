"""Full attention over paged keys and values, and gated linear attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from prfaas.colocate.model.cache import Cache


def _causal_lower_right(num_queries: int, num_keys: int) -> torch.Tensor:
    """Return the mask of keys that each of the last queries sees: all up to the query itself."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [token, head, dim] each, keys and values with fewer heads


def attend_rows(cache: Cache, layer: int, qkv: QKV, *, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Attend each row's token at `positions` [row] to the blocks `tables` [row, block]. Return [row, head, dim].

    The token attends to itself too. Writes the keys and values.
    """
    q, k, v = qkv
    block = tables.gather(1, (positions // cache.block_tokens)[:, None])[:, 0]
    _write(cache, layer, (block, positions % cache.block_tokens), k, v)
    keys, values = cache.kv[layer, 0], cache.kv[layer, 1]
    return _gathered_rows(q, keys, values, positions=positions, tables=tables)


def attend_prompt(cache: Cache, layer: int, qkv: QKV, *, start: int, table: torch.Tensor) -> torch.Tensor:
    """Attend a prompt's tokens from position `start` on to all earlier tokens. Return [token, head, dim].

    Writes the keys and values.
    """
    q, k, v = qkv
    end = start + len(q)
    positions = torch.arange(start, end)
    _write(cache, layer, (table[positions // cache.block_tokens], positions % cache.block_tokens), k, v)
    if start:
        used = table[: -(-end // cache.block_tokens)]
        k, v = (cache.kv[layer, half][used].flatten(0, 1)[:end] for half in (0, 1))
    queries, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
    if start:
        mask = _causal_lower_right(len(q), end)
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
    visible = torch.arange(keys.shape[2]) <= positions[:, None]
    # Queries that share a key head are grouped, so that no key is repeated in memory.
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
    added = (k * to_end.to(k.dtype)).transpose(-1, -2) @ v  # Contribution of each chunk, seen from its end.
    ends = torch.nn.functional.pad(
        decay[..., -1].cumsum(-1), (1, 0)
    )  # [head, chunk + 1]: log decay up to each boundary
    weights = (ends[:, :, None] - ends[:, None, :]).tril_().exp_().tril_()  # [head, boundary, boundary]
    sources = torch.cat((state[:, None], added.to(state.dtype)), 1)  # State that enters at each boundary.
    at = (weights @ sources.flatten(2)).view(sources.shape)
    return at[:, :-1], at[:, -1]


def _chunks(part: torch.Tensor) -> torch.Tensor:
    """[token, head, x] as [head, chunk, token, x]; the added tokens are zero, so they neither decay nor add."""
    padded = torch.nn.functional.pad(part.transpose(0, 1), (0, 0, 0, -part.shape[0] % CHUNK_TOKENS))
    return padded.unflatten(1, (-1, CHUNK_TOKENS))

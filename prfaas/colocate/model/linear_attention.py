"""Gated linear attention with one decay per head: the chunkwise form of prefill and the recurrence of decode.

State S [key, value] of a head: S_t = exp(g_t) S_{t-1} + k_t v_tᵀ, o_t = q_tᵀ S_t, with log decay g_t <= 0
(the scalar-gated form of GLA, arXiv 2312.06635, which is also Mamba-2's, arXiv 2405.21060). Both forms compute the same.
"""

from __future__ import annotations

import torch

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

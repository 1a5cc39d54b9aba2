"""One forward pass of the hybrid model over decode tokens, prompt tokens of one request, or both in lockstep.

Every layer multiplies all tokens at once and mixes them per request: decode rows against their blocks and states, the
prompt against itself and what its blocks already hold. The three executors differ only in what they put into a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, logsigmoid, normalize, rms_norm, silu

from prfaas.colocate.model import attention
from prfaas.colocate.model.attention import attend_prompt, attend_rows
from prfaas.colocate.model.cache import Cache
from prfaas.colocate.model.shape import ModelShape
from prfaas.colocate.model.weights import LayerWeights, Weights, mixer_widths

NORM_EPSILON = 1e-6
DECAY_SOFTENING = (
    16.0  # Log decay = logsigmoid(x) / 16, so that a state remembers some hundred tokens (GLA, section 4.4).
)


@dataclass(frozen=True)
class DecodeRows:
    """One token of each of some requests: all [row]; `tables` [row, max blocks]. Idle rows point at scratch, position 0."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True)
class PromptPart:
    """Tokens [token] of one request from position `start` on; `table` [blocks] covers at least start + tokens."""

    tokens: torch.Tensor
    start: int
    slot: int
    table: torch.Tensor


class HybridModel:
    """Weights, rotary tables and cache of one process; nothing here is written but the cache."""

    def __init__(self, shape: ModelShape, weights: Weights, cache: Cache, *, max_tokens: int) -> None:
        self.shape, self._weights, self.cache = shape, weights, cache
        device = weights.embedding.device
        dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
        angles = torch.arange(max_tokens, device=device, dtype=torch.float64)[:, None] * shape.rope_theta**-dims
        dtype = weights.embedding.dtype
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)  # [position, head_dim / 2]

    def next_tokens(self, decode: DecodeRows | None, prompt: PromptPart | None) -> torch.Tensor:
        """Return the greedy next token of each decode row, then of the prompt's last token; writes the cache of both."""
        with torch.inference_mode():
            return self._forward(decode, prompt)

    def _forward(self, decode: DecodeRows | None, prompt: PromptPart | None) -> torch.Tensor:
        weights, parts = self._weights, [part.tokens for part in (decode, prompt) if part is not None]
        x = weights.embedding[torch.cat(parts)]
        positions = self._positions(decode, prompt)
        full = linear_ = 0
        for layer in weights.layers:
            projected = linear(self._norm(x, layer.mixer_norm), layer.mixer_in)
            if layer.kind == "full_attention":
                mixed = self._attend(full, projected, positions, decode, prompt)
                full += 1
            else:
                mixed = self._remember(linear_, projected, decode, prompt)
                linear_ += 1
            x = x + linear(mixed, layer.mixer_out)
            x = x + self._feed_forward(x, layer)
        num_rows = 0 if decode is None else len(decode.tokens)
        last = x[:num_rows] if prompt is None else torch.cat((x[:num_rows], x[-1:]))
        return linear(self._norm(last, weights.norm), weights.head).argmax(-1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.shape.hidden,), weight, NORM_EPSILON)

    def _feed_forward(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate, up = linear(self._norm(x, layer.ffn_norm), layer.ffn_in).chunk(2, -1)
        return linear(silu(gate) * up, layer.ffn_out)

    def _positions(self, decode: DecodeRows | None, prompt: PromptPart | None) -> torch.Tensor:
        parts = [decode.positions] if decode is not None else []
        if prompt is not None:
            end = prompt.start + len(prompt.tokens)
            parts.append(torch.arange(prompt.start, end, device=prompt.tokens.device))
        return torch.cat(parts)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [token, head, dim]."""
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attend(
        self,
        layer: int,
        projected: torch.Tensor,
        positions: torch.Tensor,
        decode: DecodeRows | None,
        prompt: PromptPart | None,
    ) -> torch.Tensor:
        shape = self.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        every = projected.unflatten(-1, (heads + 2 * kv_heads, shape.head_dim))
        q, k, v = every.split((heads, kv_heads, kv_heads), 1)
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        rows = 0 if decode is None else len(decode.tokens)
        mixed = []
        if decode is not None:
            part = q[:rows], k[:rows], v[:rows]
            mixed.append(attend_rows(self.cache, layer, part, positions=decode.positions, tables=decode.tables))
        if prompt is not None:
            part = q[rows:], k[rows:], v[rows:]
            mixed.append(attend_prompt(self.cache, layer, part, start=prompt.start, table=prompt.table))
        return torch.cat(mixed).flatten(1)

    def _remember(
        self, layer: int, projected: torch.Tensor, decode: DecodeRows | None, prompt: PromptPart | None
    ) -> torch.Tensor:
        shape = self.shape
        heads, key, value = shape.state_heads, shape.state_key_dim, shape.state_value_dim
        padding = mixer_widths(shape, "linear_state")[0] - heads * (2 * key + 2 * value + 1)
        q, k, v, gate, decay, _ = projected.split(
            (heads * key, heads * key, heads * value, heads * value, heads, padding), -1
        )
        q, k = (normalize(part.unflatten(-1, (heads, key)), dim=-1) for part in (q, k))
        v = v.unflatten(-1, (heads, value))
        states = self.cache.states[layer]
        log_decay = logsigmoid(decay.to(states.dtype)) / DECAY_SOFTENING
        rows = 0 if decode is None else len(decode.tokens)
        mixed = []
        if decode is not None:
            out, after = attention.recurrent(
                q[:rows], k[:rows], v[:rows], log_decay=log_decay[:rows], state=states[decode.slots]
            )
            states[decode.slots] = after
            mixed.append(out.to(v.dtype))
        if prompt is not None:
            before = torch.zeros_like(states[0]) if prompt.start == 0 else states[prompt.slot]
            out, after = attention.chunkwise(q[rows:], k[rows:], v[rows:], log_decay=log_decay[rows:], state=before)
            states[prompt.slot] = after
            mixed.append(out)
        normed = rms_norm(torch.cat(mixed), (value,), None, NORM_EPSILON)
        return normed.flatten(1) * silu(gate)

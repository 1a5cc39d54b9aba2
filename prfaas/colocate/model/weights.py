"""The model's weights as views of one flat buffer, so that one handle shares them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prfaas.colocate.model.shape import LayerKind, ModelShape


@dataclass(frozen=True)
class LayerWeights:
    """Views of one layer; `mixer_in` [out, hidden] makes q, k, v (linear: and output gate and decay), `ffn_in` gate and up."""

    kind: LayerKind
    mixer_norm: torch.Tensor
    mixer_in: torch.Tensor
    mixer_out: torch.Tensor
    ffn_norm: torch.Tensor
    ffn_in: torch.Tensor
    ffn_out: torch.Tensor


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]


def num_elements(shape: ModelShape) -> int:
    """Elements of the flat buffer."""
    return sum(math.prod(size) for _, size in _sizes(shape))


def view(shape: ModelShape, flat: torch.Tensor) -> Weights:
    """Return the weights as views of `flat` [num_elements]; valid as long as the buffer is."""
    parts: dict[str, torch.Tensor] = {}
    at = 0
    for name, size in _sizes(shape):
        length = math.prod(size)
        parts[name] = flat[at : at + length].view(size)
        at += length
    layers = tuple(_layer(kind, f"{index}.", parts) for index, kind in enumerate(shape.kinds))
    return Weights(parts["embedding"], layers, parts["norm"], parts["head"])


def fill(shape: ModelShape, flat: torch.Tensor, seed: int) -> None:
    """Seeded random weights, scaled so that activations keep their size; norms are one. Equal on equal devices."""
    generator = torch.Generator(device=flat.device).manual_seed(seed)
    at = 0
    for _, size in _sizes(shape):
        length = math.prod(size)
        part = flat[at : at + length]
        if len(size) == 1:
            part.fill_(1.0)
        else:
            part.normal_(0.0, 1.0 / math.sqrt(size[1]), generator=generator)
        at += length


def _layer(kind: LayerKind, prefix: str, parts: dict[str, torch.Tensor]) -> LayerWeights:
    names = ("mixer_norm", "mixer_in", "mixer_out", "ffn_norm", "ffn_in", "ffn_out")
    return LayerWeights(kind, *(parts[prefix + name] for name in names))


def _sizes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embedding", (shape.vocab, shape.hidden)
    for index, kind in enumerate(shape.kinds):
        mixed_in, mixed_out = mixer_widths(shape, kind)
        yield f"{index}.mixer_norm", (shape.hidden,)
        yield f"{index}.mixer_in", (mixed_in, shape.hidden)
        yield f"{index}.mixer_out", (shape.hidden, mixed_out)
        yield f"{index}.ffn_norm", (shape.hidden,)
        yield f"{index}.ffn_in", (2 * shape.ffn, shape.hidden)
        yield f"{index}.ffn_out", (shape.hidden, shape.ffn)
    yield "norm", (shape.hidden,)
    yield "head", (shape.vocab, shape.hidden)


def mixer_widths(shape: ModelShape, kind: LayerKind) -> tuple[int, int]:
    """Elements per token that a mixer reads (all projections side by side) and writes."""
    if kind == "full_attention":
        heads = shape.num_heads * shape.head_dim
        return heads + 2 * shape.num_kv_heads * shape.head_dim, heads
    key, value = shape.state_heads * shape.state_key_dim, shape.state_heads * shape.state_value_dim
    # The decay's one figure per head is padded to 8 so that every row width stays a multiple of 16 bytes.
    return 2 * key + 2 * value + -(-shape.state_heads // 8) * 8, value

"""Layers of a model's KV cache in the order in which prefill finishes them. Pure."""

from __future__ import annotations

from prfaas.model.kv.geometry import Geometry


def layer_sizes(geometry: Geometry, num_tokens: int) -> list[int]:
    """Return the bytes of each layer for a prompt of `num_tokens`, first layer first.

    Layers of several kinds are spread evenly over the depth, as in hybrid models. An indexer's layers, which
    accompany attention layers, count as layers of their own.
    """
    placed = [
        ((number + 0.5) / group.num_layers, order, round(group.bytes_at(num_tokens) / group.num_layers))
        for order, group in enumerate(geometry.groups)
        for number in range(group.num_layers)
    ]
    return [size for _, _, size in sorted(placed) if size]

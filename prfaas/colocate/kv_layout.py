"""Layout of the executor's cache for the agent's pool: one group of full attention, then groups of linear layers.

All slots of the pool are as wide as the widest group. Linear layers are therefore spread over groups about as wide as an
attention block, with at least one layer each. They share one state slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from prfaas.colocate.model.cache import Cache
from prfaas.connector.block_map import BlockMap
from prfaas.connector.worker.copy_host import LayerBlocks, pages_of
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import Shard

Named = tuple[str, torch.Tensor, str]  # Layer name, cache [block, ...], names of the axes.


def describe(cache: Cache, *, model: str, weights: str) -> tuple[Layout, dict[str, LayerBlocks]]:
    """Return the layout, and each layer's blocks by name; valid as long as the cache.

    `model` is the name under which prompts are hashed, `weights` tells apart what that name may stand for.
    """
    groups: list[KVGroup] = []
    layers: dict[str, LayerBlocks] = {}
    for index, (kind, block_tokens, named) in enumerate(_groups(cache)):
        found = dict(_layers(index, named))
        layers |= found
        groups.append(KVGroup(kind, block_tokens, tuple(item.slice for item in found.values())))
    return Layout(model, f"prfaas-colocate {weights}", Shard(), tuple(groups)), layers


def block_map(layout: Layout) -> BlockMap:
    """Return the block map that `tables` follows."""
    return BlockMap(tuple(group.without_layers for group in layout.groups))


def tables(layout: Layout, blocks: Sequence[int], slot: int) -> list[Sequence[int]]:
    """Return a request's block ids by KV group."""
    return [blocks if group.keeps_all_tokens else (slot,) for group in layout.groups]


def _groups(cache: Cache) -> Iterator[tuple[str, int, list[Named]]]:
    """Kind, tokens per block and layers of each group that has any."""
    attention = [
        (f"full.{layer}.{half}", cache.kv[layer, place], "token,head,dim")
        for layer in range(cache.kv.shape[0])
        for place, half in enumerate(("key", "value"))
    ]
    states = [(f"linear.{layer}", cache.states[layer], "head,key,value") for layer in range(cache.states.shape[0])]
    if attention:
        yield "full_attention", cache.block_tokens, attention
    width = sum(map(_block_bytes, attention))
    together = max(1, width // _block_bytes(states[0])) if states else 1
    for first in range(0, len(states), together):
        yield "linear_state", HASH_UNIT_TOKENS, states[first : first + together]


def _block_bytes(named: Named) -> int:
    return int(named[1][0].nbytes)


def _layers(group: int, named: Sequence[Named]) -> Iterator[tuple[str, LayerBlocks]]:
    offset = 0
    for layer, (name, cache, axes) in enumerate(named):
        pages = pages_of(name, cache, cache.shape[0])
        order = f"{axes} {'x'.join(map(str, cache.shape[1:]))}"
        dtype = str(cache.dtype).removeprefix("torch.")
        yield name, LayerBlocks(group, layer, LayerSlice(name, offset, pages.shape[1], dtype, order), pages)
        offset += pages.shape[1]

"""Construction of a side's model and runner over shared memory."""

from __future__ import annotations

import os

import torch

from prfaas.colocate.device import memory
from prfaas.colocate.device.cpu import CpuRunner, CpuSets
from prfaas.colocate.device.memory import SharedTensor
from prfaas.colocate.device.runner import Runner
from prfaas.colocate.model import cache, weights
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel
from prfaas.colocate.model.shape import SHAPES
from prfaas.colocate.processes.shared_memory import Side

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def allocate(
    shape: str, cache_shape: CacheShape, *, dtype: str, seed: int
) -> tuple[SharedTensor, SharedTensor, SharedTensor]:
    """Return shared memory for weights, keys and values, and states."""
    sizes = SHAPES[shape]
    flat = memory.allocate(weights.num_elements(sizes), dtype)
    weights.fill(sizes, flat.tensor, seed)
    kv = memory.allocate(cache.kv_elements(sizes, cache_shape), dtype)
    states = memory.allocate(cache.state_elements(sizes, cache_shape), cache.state_dtype(dtype))
    return flat, kv, states


def model_on(shape: str, cache_shape: CacheShape, tensors: Tensors, *, max_tokens: int) -> HybridModel:
    """Return the model over flat tensors from `allocate`. The tensors must outlive the model."""
    sizes = SHAPES[shape]
    view = cache.view(sizes, cache_shape, tensors[1], tensors[2])
    return HybridModel(sizes, weights.view(sizes, tensors[0]), view, max_tokens=max_tokens)


def runner_on(
    model: HybridModel, side: Side, *, partition: str, max_rows: int, max_blocks: int, num_threads: int = 0
) -> Runner:
    """Return the runner of one side."""
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))
    sets = CpuSets(side, num_threads) if partition == "affinity" else None
    return CpuRunner(model, max_rows=max_rows, max_blocks=max_blocks, sets=sets)

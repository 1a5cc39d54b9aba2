"""A tiny model in double precision: rounding can never decide a token."""

import torch

from prfaas.colocate.model import cache, weights
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel
from prfaas.colocate.model.shape import TINY

CACHE = CacheShape(num_blocks=65, block_tokens=16, num_state_slots=9)


def tiny_model(seed: int = 3, cache_shape: CacheShape = CACHE) -> HybridModel:
    """Return a model whose cache is poisoned, so that reading what nobody wrote shows."""
    flat = torch.empty(weights.num_elements(TINY), dtype=torch.float64)
    weights.fill(TINY, flat, seed)
    kv = torch.full((cache.kv_elements(TINY, cache_shape),), 1e30, dtype=torch.float64)
    states = torch.full((cache.state_elements(TINY, cache_shape),), 1e30, dtype=torch.float64)
    view = cache.view(TINY, cache_shape, kv, states)
    return HybridModel(TINY, weights.view(TINY, flat), view, max_tokens=1024)

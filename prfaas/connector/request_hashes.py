"""The hash chain of a vLLM request's tokens, with vLLM's own extra keys: LoRA, media, cache salt, prompt embeddings."""

from __future__ import annotations

from typing import Any

import msgpack
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from prfaas.hashing import HASH_UNIT_TOKENS, HashChain, root_hash


def token_chain(request: Any, num_tokens: int, *, model: str, tenant: str) -> HashChain | None:
    """The chain over the first `num_tokens` tokens of prompt and answer; None when the request has no token ids, or extras that
    no hash covers. A salt that is the tenant is in its root alone."""
    if request.prompt_token_ids is None:
        return None
    token_ids = request.all_token_ids[:num_tokens]
    try:
        extra_keys = _extra_keys(request, len(token_ids), tenant)
        return HashChain(root_hash(model, tenant.encode()), token_ids, extra_keys=extra_keys)
    except (TypeError, ValueError, OverflowError):
        return None


def _extra_keys(request: Any, num_tokens: int, tenant: str) -> dict[int, bytes]:
    """By unit of 16 tokens, what is hashed beside its tokens."""
    is_salted = bool(request.cache_salt) and request.cache_salt != tenant
    if not (request.lora_request or request.mm_features or is_salted or request.prompt_embeds is not None):
        return {}
    keys: dict[int, bytes] = {}
    media = 0
    for unit, start in enumerate(range(0, num_tokens, HASH_UNIT_TOKENS)):
        end = min(start + HASH_UNIT_TOKENS, num_tokens)
        extra, media = generate_block_hash_extra_keys(request, start, end, media)
        extra = [key for key in extra or () if key != ("cache_salt", tenant)]
        if extra:
            keys[unit] = msgpack.packb(extra)
    return keys

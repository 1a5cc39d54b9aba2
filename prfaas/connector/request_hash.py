"""A vLLM request's chain of block hashes, with every extra key that changes what its tokens mean."""

from __future__ import annotations

from typing import Any

from prfaas.hashing import HASH_UNIT_TOKENS, HashChain, root_hash


def request_chain(request: Any, num_tokens: int, *, model: str, tenant: str) -> HashChain | None:
    """The chain of the first `num_tokens` prompt tokens; None when something in the request cannot be hashed.

    LoRA and cache salt concern every token and go into the root; an image counts from the unit where it begins
    (the same keys as vLLM's `generate_block_hash_extra_keys`).
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    lora = request.lora_request
    name = model if lora is None else f"{model}\0lora:{lora.lora_name}\0{lora.lora_path}"
    salt = tenant if request.cache_salt is None else f"{tenant}\0salt:{request.cache_salt}"
    extra: dict[int, bytes] = {}
    for feature in request.mm_features:
        if not feature.identifier:
            return None
        unit, at = divmod(feature.mm_position.offset, HASH_UNIT_TOKENS)
        extra[unit] = extra.get(unit, b"") + f"{feature.identifier}@{at};".encode()
    return HashChain(root_hash(name, salt.encode()), request.prompt_token_ids[:num_tokens], extra_keys=extra)

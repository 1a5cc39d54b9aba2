"""Requests of vLLM as the connector sees them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgpack
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import RequestStatus

from prfaas.connector.metadata import Outcome
from prfaas.connector.transfer_params import EngineRequest, tenant_of
from prfaas.hashing import HASH_UNIT_TOKENS, HashChain, root_hash


def engine_request(request: Any, num_tokens: int, *, model: str, has_priorities: bool) -> EngineRequest:
    """Return the request with its first `num_tokens` tokens as prompt. They are hashed once per tenant.

    Without `has_priorities` vLLM ignores the priorities of clients, and so does the connector.
    """
    return EngineRequest(
        request.request_id,
        num_tokens,
        request.kv_transfer_params or {},
        cache(lambda tenant: token_chain(request, num_tokens, model=model, tenant=tenant)),
        request.cache_salt or "",
        _exclusion(request),
        request.priority if has_priorities else 0,
    )


def _exclusion(request: Any) -> Outcome | None:
    """Return why vLLM takes nothing from a connector for this request, if so.

    A decode leg that vLLM's API refuses arrives with another prompt and ends at once, so that its KV is released.
    """
    if request.abort_immediately:
        return "rejected"
    return "whole_prompt" if request.skip_reading_prefix_cache else None


def computed_chain(request: Any, model: str, *, default_tenant: str, moves_states: bool = False) -> HashChain | None:
    """Return the hash chain of the computed tokens, or None if the blocks may hold others.

    The blocks are right after an answer that ended by itself. They hold all tokens but the last, or all if vLLM schedules
    asynchronously and a further step was running. With speculative decoding vLLM may count rejected drafts as computed.
    If it also `moves_states`, the state after an answer stands in the block of the last accepted draft, of which only the
    worker knows the number. Then the blocks are right after a prompt alone.
    """
    if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        return None
    if moves_states and request.num_computed_tokens > request.num_prompt_tokens:
        return None
    if request.num_computed_tokens < request.num_tokens - 1:
        return None
    has_drafts = request.num_computed_tokens > request.num_tokens
    num_tokens = request.num_tokens - 1 if has_drafts else request.num_computed_tokens
    tenant = tenant_of(request.kv_transfer_params or {}, request.cache_salt, default=default_tenant)
    return token_chain(request, num_tokens, model=model, tenant=tenant)


def token_chain(request: Any, num_tokens: int, *, model: str, tenant: str) -> HashChain | None:
    """Return the hash chain of the first `num_tokens` tokens of prompt and answer.

    None means that the request has no token ids, or extras that no hash covers. A salt that equals the tenant is hashed
    only in the root.
    """
    if request.prompt_token_ids is None:
        return None
    token_ids = request.all_token_ids[:num_tokens]
    try:
        extra_keys = _extra_keys(request, len(token_ids), tenant)
        return HashChain(root_hash(model, tenant.encode()), token_ids, extra_keys=extra_keys)
    except (TypeError, ValueError, OverflowError):
        return None


def _extra_keys(request: Any, num_tokens: int, tenant: str) -> dict[int, bytes]:
    """Return the data to hash together with the tokens, by unit of 16 tokens."""
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

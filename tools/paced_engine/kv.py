"""The KV of a model that does not exist: its layout, and what each of its blocks must hold."""

from __future__ import annotations

import hashlib

from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.hashing import HashChain, root_hash
from prfaas.types import BlockHash, GroupBlocks, Shard

BLOCK_TOKENS = 32
NUM_LAYERS = 4
_PERIOD_BYTES = 997


def layout_of(model: str, *, bytes_per_token: int, state_bytes: int) -> Layout:
    """Full attention of `NUM_LAYERS` layers, and a linear state."""
    size = max(1, bytes_per_token * BLOCK_TOKENS // NUM_LAYERS)
    layers = tuple(LayerSlice(f"a{n}", n * size, size, "uint8", "byte") for n in range(NUM_LAYERS))
    state = (LayerSlice("s0", 0, state_bytes, "uint8", "byte"),)
    return Layout(
        model, "", Shard(), (KVGroup("full_attention", BLOCK_TOKENS, layers), KVGroup("linear_state", 0, state))
    )


def chain_of(model: str, prompt: list[int]) -> HashChain:
    """The hashes of a prompt of the deployment's only tenant."""
    return HashChain(root_hash(model), prompt)


def groups_of(chain: HashChain) -> tuple[GroupBlocks, ...]:
    """What a transfer of the whole chain consists of."""
    num_tokens = chain.num_tokens
    hashes = chain.blocks(BLOCK_TOKENS, first_block=0, num_tokens=num_tokens)
    if num_tokens % BLOCK_TOKENS:  # with a state a prompt is resumed at its exact length
        hashes = (*hashes[:-1], chain.at(num_tokens))
    return (
        GroupBlocks(0, 0, hashes, chain.at(0)),
        GroupBlocks(1, 0, (chain.at(num_tokens),), chain.at(num_tokens // 16 * 16)),
    )


def content(block_hash: BlockHash, layer: int, size: int) -> bytes:
    """What a layer of a block holds: a function of the tokens before its end, as KV is."""
    pattern = hashlib.shake_128(block_hash + bytes([layer])).digest(_PERIOD_BYTES)
    return (pattern * (size // _PERIOD_BYTES + 1))[:size]


def answer(prompt: list[int], num_tokens: int, *, is_right: bool = True) -> list[int]:
    """The tokens that follow a prompt; other ones where its KV was not what it must be."""
    seed = repr(prompt).encode() + (b"" if is_right else b"wrong")
    return [value % 50_000 for value in hashlib.shake_128(seed).digest(2 * num_tokens)[::2]]

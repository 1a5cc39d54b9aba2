"""KV of an imaginary model: layout, and content of each block."""

from __future__ import annotations

import hashlib

from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import BlockHash, GroupBlocks, Shard

BLOCK_TOKENS = 32
NUM_LAYERS = 4
_PERIOD_BYTES = 997


def layout_of(model: str, *, bytes_per_token: int, state_bytes: int) -> Layout:
    """Return a layout with `NUM_LAYERS` layers of full attention and a linear state."""
    size = max(1, bytes_per_token * BLOCK_TOKENS // NUM_LAYERS)
    layers = tuple(LayerSlice(f"a{n}", n * size, size, "uint8", "byte") for n in range(NUM_LAYERS))
    state = (LayerSlice("s0", 0, state_bytes, "uint8", "byte"),)
    return Layout(
        model, "", Shard(), (KVGroup("full_attention", BLOCK_TOKENS, layers), KVGroup("linear_state", 0, state))
    )


def chain_of(model: str, prompt: list[int], *, salt: str = "") -> HashChain:
    """Return the hash chain of a prompt."""
    return HashChain(root_hash(model, salt.encode()), prompt)


def groups_of(chain: HashChain) -> tuple[GroupBlocks, ...]:
    """Return the blocks that a transfer of the whole chain consists of."""
    num_tokens = chain.num_tokens
    hashes = chain.blocks(BLOCK_TOKENS, first_block=0, num_tokens=num_tokens)
    if num_tokens % BLOCK_TOKENS:  # A linear state resumes a prompt at its exact length.
        hashes = (*hashes[:-1], chain.at(num_tokens))
    return (
        GroupBlocks(0, 0, hashes, chain.at(0)),
        GroupBlocks(1, 0, (chain.at(num_tokens),), chain.at(num_tokens // 16 * 16)),
    )


def block_content(block_hash: BlockHash, layer: int, size: int) -> bytes:
    """Return the content of a layer of a block, a function of all tokens up to its end."""
    pattern = hashlib.shake_128(block_hash + bytes([layer])).digest(_PERIOD_BYTES)
    return (pattern * (size // _PERIOD_BYTES + 1))[:size]


def answer_tokens(prompt: list[int], num_tokens: int, *, is_kv_correct: bool = True) -> list[int]:
    """Return the tokens that follow a prompt; different tokens if its KV was wrong."""
    seed = repr(prompt).encode() + (b"" if is_kv_correct else b"wrong")
    return [value % 50_000 for value in hashlib.shake_128(seed).digest(2 * num_tokens)[::2]]

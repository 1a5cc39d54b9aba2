"""The block hash."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.hashing import HASH_UNIT_TOKENS, NO_HASH, HashChain, root_hash, token_bytes

ROOT = root_hash("model")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_first_unit_is_sha256_of_root_extra_length_and_little_endian_tokens() -> None:
    ids = list(range(16))
    body = ROOT + (0).to_bytes(4, "little") + b"".join(token.to_bytes(4, "little") for token in ids)
    assert HashChain(ROOT, ids).units == [hashlib.sha256(body).digest()[:16]]


@given(tokens)
def test_equal_prefixes_have_equal_hashes_and_only_those(ids: list[int]) -> None:
    whole = HashChain(ROOT, ids)
    for length in range(len(ids) + 1):
        assert whole.at(length) == HashChain(ROOT, ids[:length]).at(length)
    if ids:
        changed = [*ids[:-1], ids[-1] ^ 1]
        assert HashChain(ROOT, changed).at(len(ids)) != whole.at(len(ids))


@given(tokens, st.integers(0, 3))
def test_blocks_end_at_the_unit_hash_of_their_last_token(ids: list[int], first_block: int) -> None:
    chain = HashChain(ROOT, ids)
    hashes = chain.blocks(32, first_block=first_block, num_tokens=len(ids))
    for offset, block_hash in enumerate(hashes):
        end = (first_block + offset + 1) * 32
        assert block_hash == (chain.at(end) if end <= len(ids) else NO_HASH)
    assert first_block + len(hashes) == max(first_block, -(-len(ids) // 32))


def test_model_and_tenant_and_extra_keys_each_change_every_hash() -> None:
    ids = list(range(40))
    chains = [
        HashChain(ROOT, ids),
        HashChain(root_hash("other"), ids),
        HashChain(root_hash("model", b"tenant"), ids),
        HashChain(ROOT, ids, extra_keys={0: b"image"}),
    ]
    for length in (16, 32, 40):
        assert len({chain.at(length) for chain in chains}) == len(chains)


def test_an_extra_key_changes_only_what_follows_it() -> None:
    ids = list(range(48))
    plain, marked = HashChain(ROOT, ids), HashChain(ROOT, ids, extra_keys={1: b"image"})
    assert plain.at(16) == marked.at(16)
    assert plain.at(32) != marked.at(32)


def test_a_partial_tail_differs_from_the_same_tokens_with_zeros_after() -> None:
    assert HashChain(ROOT, [0] * 5).at(5) != HashChain(ROOT, [0] * 6).at(6)


def test_a_length_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="17 is outside the prompt of 16"):
        HashChain(ROOT, [1] * 16).at(17)


def test_a_block_size_off_the_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        HashChain(ROOT, [1] * 16).blocks(24, first_block=0, num_tokens=16)


def test_token_ids_outside_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        token_bytes([2**32])
    with pytest.raises(OverflowError):
        token_bytes([-1])
    assert len(token_bytes([1] * HASH_UNIT_TOKENS)) == 64

"""Block hashes: a chain of 128-bit hashes over every 16 tokens, rooted in model and tenant.

    H(root) = SHA-256("prfaas/1" + len(model) + model identity + tenant salt)[:16]
    H(i)    = SHA-256(H(i-1) + len(extra) + extra keys of unit i + token ids of unit i)[:16]

The hash of a block is the hash of the block's last unit. Lengths and token ids are little-endian u32. Extra keys are
the engine's: LoRA, media, cache salt, prompt embeddings. A request with extras that cannot be hashed has no hashes.
With 1e9 blocks, 64 bits would collide with 2.7 % probability.
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence

from prfaas.types import BlockHash, Prefix

HASH_BYTES = 16
HASH_UNIT_TOKENS = 16
_UNIT_BYTES = 4 * HASH_UNIT_TOKENS
NO_HASH = BlockHash(bytes(HASH_BYTES))


def root_hash(model: str, tenant_salt: bytes = b"") -> BlockHash:
    """Return the parent of the first unit of every prompt of this model and tenant."""
    name = model.encode()
    return _digest(b"prfaas/1", len(name).to_bytes(4, "little"), name, tenant_salt)


def prefix_hash(prefix: Prefix) -> BlockHash:
    """Return one hash of the model and all units of a prefix. The end of the prefix has its own hash."""
    name = prefix.model.encode()
    return _digest(b"prfaas/prefix/1", len(name).to_bytes(4, "little"), name, prefix.units)


def _digest(*parts: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(b"".join(parts)).digest()[:HASH_BYTES])


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32.

    Raises:
        OverflowError: a token id is negative or needs more than 32 bits.
    """
    packed = array("I", token_ids)
    return packed.tobytes()


class HashChain:
    """Hashes of one prompt. `units[i]` covers tokens [0, 16·(i+1)); `at` hashes any length."""

    def __init__(
        self, root: BlockHash, token_ids: Sequence[int], *, extra_keys: Mapping[int, bytes] | None = None
    ) -> None:
        """Hash `token_ids`. `extra_keys[i]` is mixed into unit i, such as the content hash of an image that begins there."""
        self.root = root
        self.num_tokens = len(token_ids)
        self._packed = token_bytes(token_ids)
        self._extra_keys = dict(extra_keys or {})
        self.units: list[BlockHash] = []
        for parent in self._plain_units(root) if not extra_keys else self._units(root):
            self.units.append(parent)

    def _units(self, parent: BlockHash) -> Iterator[BlockHash]:
        for unit in range(self.num_tokens // HASH_UNIT_TOKENS):
            parent = self._unit(parent, unit, HASH_UNIT_TOKENS)
            yield parent

    def _plain_units(self, parent: BlockHash) -> Iterator[BlockHash]:
        """Yield the unit hashes without extra keys, three times as fast as `_units`. Long prompts have thousands of units."""
        digest, packed, no_extra = hashlib.sha256, self._packed, (0).to_bytes(4, "little")
        for start in range(0, self.num_tokens // HASH_UNIT_TOKENS * _UNIT_BYTES, _UNIT_BYTES):
            parent = BlockHash(digest(parent + no_extra + packed[start : start + _UNIT_BYTES]).digest()[:HASH_BYTES])
            yield parent

    def _unit(self, parent: BlockHash, unit: int, num_tokens: int) -> BlockHash:
        start = unit * _UNIT_BYTES
        extra = self._extra_keys.get(unit, b"")
        return _digest(parent, len(extra).to_bytes(4, "little"), extra, self._packed[start : start + num_tokens * 4])

    def at(self, num_tokens: int) -> BlockHash:
        """Return the hash of exactly the first `num_tokens` tokens, or the root for 0.

        Raises:
            ValueError: the prompt is shorter than that.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens {num_tokens} is outside the prompt of {self.num_tokens} tokens")
        full, tail = divmod(num_tokens, HASH_UNIT_TOKENS)
        parent = self.units[full - 1] if full else self.root
        return self._unit(parent, full, tail) if tail else parent

    def blocks(self, block_tokens: int, *, first_block: int, num_tokens: int) -> tuple[BlockHash, ...]:
        """Return one hash per block from `first_block` up to `num_tokens`. A partial last block is NO_HASH.

        Raises:
            ValueError: `block_tokens` is not a multiple of 16.
        """
        if block_tokens % HASH_UNIT_TOKENS:
            raise ValueError(f"block_tokens {block_tokens} is not a multiple of {HASH_UNIT_TOKENS}")
        units_per_block = block_tokens // HASH_UNIT_TOKENS
        num_full = num_tokens // block_tokens
        hashes = [self.units[(block + 1) * units_per_block - 1] for block in range(first_block, num_full)]
        if num_tokens % block_tokens and first_block <= num_full:
            hashes.append(NO_HASH)
        return tuple(hashes)

"""Engine that stores prefixes in a real agent's pool and checks their bytes."""

import hashlib
import os

from prfaas.agent.engine.protocol import HELD, Hold, ReceiveReady, Release, SendOpened, Store, TransferFailed
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout, prefix_groups
from prfaas.kv.parts import LayerSlice
from prfaas.types import GroupBlocks, Prefix, Shard, TransferId
from tests.support.agents import AttachedEngine
from tests.support.waiting import wait_until

MODEL = "tiny"
ROOT = root_hash(MODEL)
FULL_BYTES, WINDOW_BYTES, STATE_BYTES = 12_000, 4_000, 30_000
BLOCK_TOKENS, WINDOW_TOKENS = 32, 65


def three_groups(*, dtype: str = "float32") -> Layout:
    """Return a layout with full attention, a sliding window and a linear state."""

    def layer(name: str, offset: int, size: int) -> LayerSlice:
        return LayerSlice(name, offset, size, dtype, "head,token,kv_dim")

    half = FULL_BYTES // 2
    full = KVGroup("full_attention", BLOCK_TOKENS, (layer("a0", 0, half), layer("a1", half, half)))
    window = KVGroup("sliding_window", BLOCK_TOKENS, (layer("w0", 0, WINDOW_BYTES),), WINDOW_TOKENS)
    return Layout(MODEL, "", Shard(), (full, window, KVGroup("linear_state", 0, (layer("s0", 0, STATE_BYTES),))))


def chain_of(num_tokens: int, *, seed: int = 0) -> HashChain:
    return HashChain(ROOT, [(seed * 7919 + position) % 50_000 for position in range(num_tokens)])


def prefix_of(chain: HashChain, num_tokens: int) -> Prefix:
    return Prefix(MODEL, b"".join(chain.units[: num_tokens // 16]), num_tokens, chain.at(num_tokens))


def sizes(num_full: int, num_window: int, num_states: int) -> int:
    return num_full * FULL_BYTES + num_window * WINDOW_BYTES + num_states * STATE_BYTES


class PrefixEngine(AttachedEngine):
    """Engine with three KV groups, which stores and checks prefixes by hand."""

    @property
    def layout(self) -> Layout:
        return self.layouts[0]

    def leave(self, prefix: Prefix) -> None:
        """Store a prefix and wait until it is in the pool."""
        groups = self._groups(prefix)
        transfer_id = TransferId(os.urandom(16))
        self.scheduler.post(Store(transfer_id, prefix.num_tokens, groups))
        opened = self.wait(SendOpened)
        for position, blocks in enumerate(groups):
            self._fill(opened, position, blocks)
        self.push(RingEntry(EntryKind.REQUEST_ENDED, opened.handle))
        wait_until(lambda: self.holds(prefix), what="the prefix in the pool")

    def _groups(self, prefix: Prefix) -> tuple[GroupBlocks, ...]:
        return prefix_groups(self.layout, prefix, root=ROOT)

    def _fill(self, opened: SendOpened, position: int, blocks: GroupBlocks) -> None:
        for layer, piece in enumerate(self.layout.groups[position].layers):
            for index, slot in enumerate(opened.slots[0][position]):
                if slot != HELD:
                    where = self.slot(slot, piece.offset_bytes, piece.payload_bytes)
                    where[:] = _content(blocks.hashes[index], layer, piece.payload_bytes)
            self.push(RingEntry(EntryKind.LAYER_READY, opened.handle, position, layer, 0, blocks.num_blocks))

    def holds(self, prefix: Prefix) -> bool:
        """Return whether every block of the prefix is in the pool, and check the bytes of each."""
        groups = self._groups(prefix)
        self.scheduler.post(Hold(TransferId(os.urandom(16)), prefix.num_tokens, groups))
        answer = self.wait_any()
        if isinstance(answer, TransferFailed):
            return False
        assert isinstance(answer, ReceiveReady), answer
        for position, blocks in enumerate(groups):
            for index, slot in enumerate(answer.slots[0][position]):
                for layer, piece in enumerate(self.layout.groups[position].layers):
                    got = bytes(self.slot(slot, piece.offset_bytes, piece.payload_bytes))
                    assert got == _content(blocks.hashes[index], layer, piece.payload_bytes), (position, index, layer)
        self.scheduler.post(Release(answer.transfer_id))
        return True


def _content(block_hash: bytes, layer: int, size: int) -> bytes:
    pattern = hashlib.shake_128(block_hash + bytes([layer])).digest(997)
    return (pattern * (size // 997 + 1))[:size]

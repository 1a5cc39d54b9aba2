"""An index full of made-up prompts: of each one node holds all, one half, the others the first tenth."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prfaas.index.membership import Engine, Node
from prfaas.index.query import Query
from prfaas.index.segments import CELL_BLOCKS, TAIL_BYTES, Announcement, Checkpoint, Holding, Segment
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import AgentName, BlockHash, ClusterName, InstanceId, Shard

MODEL = "bench"
BLOCKS_PER_PROMPT = 2000  # 32K tokens in blocks of 16
BLOCKS_PER_STATE = 64  # A state every 1,024 tokens.
HASH = 16


def layout(*, hybrid: bool) -> Layout:
    layers = (LayerSlice("layer", 0, 64, "bfloat16", "token"),)
    attention = KVGroup("full_attention", 16, layers)
    return Layout(MODEL, "", Shard(), (attention, KVGroup("linear_state", 0, layers)) if hybrid else (attention,))


def node(number: int, node_layout: Layout) -> Node:
    engine = Engine(InstanceId(f"e{number}"), f"http://n{number}", "both", MODEL)
    return Node(
        AgentName(f"n{number}"), ClusterName(f"c{number}"), "pd", f"n{number}:7400", 1, (node_layout,), (engine,)
    )


def prompt() -> bytes:
    """Hashes of one prompt's blocks, joined. Random bytes: a hash's value does not matter here."""
    return os.urandom(BLOCKS_PER_PROMPT * HASH)


def query(hashes: bytes) -> Query:
    return Query(MODEL, hashes, BLOCKS_PER_PROMPT * 16)


def announcements(hashes: bytes, num_blocks: int, node_layout: Layout) -> Iterator[Announcement]:
    """Yield the first `num_blocks` blocks of a prompt, and with a hybrid layout a state at the end of every cell."""
    blocks, states = Holding(node_layout.fingerprint, 0, "memory"), Holding(node_layout.fingerprint, 1, "memory")
    tails = b"".join(hashes[at : at + TAIL_BYTES] for at in range(0, len(hashes), HASH))
    for first in range(0, num_blocks, CELL_BLOCKS):
        end = min(first + CELL_BLOCKS, num_blocks)
        path = tails[first * TAIL_BYTES : end * TAIL_BYTES]
        yield Segment(blocks, _hash(hashes, first), path, (1 << (end - first)) - 1, stored=True)
        if len(node_layout.groups) > 1 and end - first == BLOCKS_PER_STATE:
            last = _hash(hashes, end - 1)
            yield Checkpoint(states, last, last, end * 16, stored=True, head=_hash(hashes, first))


def _hash(hashes: bytes, block: int) -> BlockHash:
    return BlockHash(hashes[block * HASH : (block + 1) * HASH])


def holders(number: int, num_nodes: int) -> list[tuple[int, int]]:
    """(node, blocks held) of prompt `number`."""
    shares = [BLOCKS_PER_PROMPT, BLOCKS_PER_PROMPT // 2] + [BLOCKS_PER_PROMPT // 10] * num_nodes
    return [((number + place) % num_nodes, shares[place]) for place in range(num_nodes)]

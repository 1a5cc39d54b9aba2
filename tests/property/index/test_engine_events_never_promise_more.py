"""Random lives of an engine's cache, told with batches lost, against what the engine really holds."""

from __future__ import annotations

import functools
import random
import sys
from itertools import product
from typing import Any

import msgpack
import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.index.engine.cache import EngineCache, gpu_layout
from prfaas.index.engine.events import decode_batch
from prfaas.index.inventory import Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import Query
from prfaas.kv.layout import Layout
from prfaas.types import AgentName, ClusterName, InstanceId, Shard
from tests.support.index_world import group, serves

NODE = AgentName("n1")
BLOCK = 32
GROUPS = (group("full_attention", BLOCK), group("sliding_window", BLOCK, 40), group("linear_state", 0))
Held = set[tuple[int, str]]  # (group, the engine's hash), which is the tokens' and extras' own text


class Engine:
    """A cache of three KV groups and the batches that it publishes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.held: Held = set()
        shared = tuple(self.random.randrange(100) for _ in range(6 * BLOCK))
        fork = tuple(self.random.randrange(100) for _ in range(6 * BLOCK))
        self.prompts = [shared, shared[: 3 * BLOCK] + fork, fork]

    def batch(self) -> bytes:
        events = [self._change() for _ in range(self.random.randint(1, 4))]
        packed: bytes = msgpack.packb([0.0, [event for event in events if event], 0])
        return packed

    def _change(self) -> Any:
        chance = self.random.random()
        if chance < 0.05:
            self.held.clear()
            return self._event("AllBlocksCleared", {})
        return self._remove() if chance < 0.35 else self._store()

    def _store(self) -> Any:
        prompt, which = self.random.choice(self.prompts), self.random.randrange(3)
        salt = "salt" if self.random.random() < 0.15 else ""
        first = self.random.randrange(5)
        last = self.random.randint(first + 1, 6)
        blocks = [block for block in range(first, last) if which == 0 or self.random.random() < 0.5]
        hashes = [name(prompt, block, salt) for block in blocks]
        self.held |= {(which, block_hash) for block_hash in hashes}
        return self._event(
            "BlockStored",
            {
                "block_hashes": [block_hash.encode() for block_hash in hashes],
                "parent_block_hash": name(prompt, first - 1, salt).encode() if first else None,
                "token_ids": prompt[first * BLOCK : last * BLOCK],
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["salt"] if salt and block == 0 else None for block in blocks],
                "group_idx": which,
            },
        )

    def _remove(self) -> Any:
        if not self.held:
            return None
        which, gone = self.random.choice(sorted(self.held))
        self.held.remove((which, gone))
        return self._event("BlockRemoved", {"block_hashes": [gone.encode()], "medium": "GPU", "group_idx": which})

    def _event(self, kind: str, fields: dict[str, Any]) -> Any:
        return {"type": kind, **fields}

    def usable(self, prompt: tuple[int, ...], salt: str) -> int:
        """The longest prefix that all groups hold, by looking at every length."""
        held = [{block for block in range(6) if (which, name(prompt, block, salt)) in self.held} for which in range(3)]
        states = {(block + 1) * BLOCK for block in held[2]}
        exact: list[set[int]] = [set(), set(), states]
        lengths = range(len(prompt), 0, -1)
        fits = (
            n for n in lengths if all(serves(GROUPS[i], held[i], exact[i], n) for i in (2, 1, 0))
        )  # Cheap checks come first.
        return next(fits, 0)


@functools.lru_cache(64)  # Of one life.
def name(prompt: tuple[int, ...], block: int, salt: str) -> str:
    """The engine's hash of a block: alike in every group, unlike for unlike prefixes."""
    return f"{salt}{prompt[: (block + 1) * BLOCK]}"


def run_life(seed: int) -> tuple[int, int]:
    """Play one life; returns (queries, queries whose answer was shorter than it could be)."""
    engine, index, inventory = Engine(seed), Index(), Inventory()
    layout = gpu_layout(Layout("m", "", Shard(), GROUPS), InstanceId("e1"))
    inventory.add_layout(layout)
    index.register(NODE, cluster=ClusterName("east"), epoch=1, layouts=[layout])
    cache, queries, missed = EngineCache([layout]), 0, 0
    for _ in range(engine.random.randint(2, 20)):
        payload = engine.batch()
        if engine.random.random() < 0.1:
            index.apply(NODE, inventory.apply(cache.clear()))  # A feed does this once a batch is lost.
            continue
        index.apply(NODE, inventory.apply(cache.apply(decode_batch(payload))))
        for prompt, salt in product(engine.prompts, ("", "salt")):
            units = b"".join(HashChain(root_hash("m", salt.encode()), prompt).units)
            nodes = index.match(Query("m", units, len(prompt)), tiers=frozenset({"gpu"})).nodes
            promised, best = nodes[0].usable_tokens if nodes else 0, engine.usable(prompt, salt)
            assert promised <= best, f"seed {seed}: promises {promised}, holds {best}"
            queries += 1
            missed += promised < best
    assert index.digests(NODE) == inventory.digests(), f"seed {seed}: digests differ"
    return queries, missed


def run_lives(count: int) -> str:
    """Return a summary of the queries and misses."""
    results = [run_life(seed) for seed in range(count)]
    queries, missed = sum(r[0] for r in results), sum(r[1] for r in results)
    assert missed < 0.5 * queries, "most of what is there is found, or this shows nothing"
    return f"{queries} queries, none answered with more than is there, {missed} false misses"


def test_no_match_exceeds_the_engines_cache() -> None:
    run_lives(80)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_lives(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_lives(10_000)
    with capsys.disabled():
        sys.stdout.write(f"{summary}\n")

"""Run by peers.py where LMCache is: fills its coordinator's directory of keys, looks prompts up, prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from lmcache.v1.distributed.api import EncodedObjectKey, ObjectKey, Tier  # type: ignore[import-not-found]  # is on this run's path alone
from lmcache.v1.mp_coordinator.api import (  # type: ignore[import-not-found]
    CacheEventBatch,
    CacheEventEntry,
    CacheEventType,
)
from lmcache.v1.mp_coordinator.views.key_directory import KeyDirectory  # type: ignore[import-not-found]

MODEL = "bench"
BLOCKS_PER_PROMPT = 2000
QUERIES = 1000
KEPT_PROMPTS = 300


def main() -> None:
    num_blocks, num_nodes = int(sys.argv[1]), int(sys.argv[2])
    directory, kept, seconds, told = KeyDirectory(), [], 0.0, 0
    num_prompts = num_blocks // BLOCKS_PER_PROMPT
    for number in range(num_prompts):
        hashes = [os.urandom(16) for _ in range(BLOCKS_PER_PROMPT)]
        if number % max(1, num_prompts // KEPT_PROMPTS) == 0:
            kept.append([ObjectKey(block_hash, MODEL, 0) for block_hash in hashes])
        for place, share in enumerate(_shares(num_nodes)):
            batch = _batch((number + place) % num_nodes, number, hashes[:share])
            started = time.perf_counter()
            directory.consume(batch)
            seconds += time.perf_counter() - started
            told += share
    found = {"blocks": num_blocks, "announced_blocks_per_second": round(told / seconds)}
    print(json.dumps(found | {"match_2000_blocks": _ask(directory, kept)}), flush=True)


def _shares(num_nodes: int) -> list[int]:
    return [BLOCKS_PER_PROMPT, BLOCKS_PER_PROMPT // 2, *[BLOCKS_PER_PROMPT // 10] * (num_nodes - 2)]


def _batch(node: int, number: int, hashes: list[bytes]) -> Any:
    entries = [CacheEventEntry(EncodedObjectKey(block_hash.hex(), MODEL, 0), size_bytes=1) for block_hash in hashes]
    return CacheEventBatch(f"n{node}", 1, number + 1, CacheEventType.STORE, Tier.L1, "dram", entries)


def _ask(directory: Any, prompts: list[list[Any]]) -> dict[str, float]:
    seconds = []
    for number in range(QUERIES + 20):
        asked = prompts[number % len(prompts)]
        started = time.perf_counter()
        found = directory.lookup(asked)
        seconds.append(time.perf_counter() - started)
        assert all(found), "every prompt is known"
    cuts = statistics.quantiles(seconds[20:], n=100)
    named = {"min": min(seconds[20:]), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds[20:])}
    return {f"{name}_microseconds": round(value * 1e6, 1) for name, value in named.items()}


if __name__ == "__main__":
    main()

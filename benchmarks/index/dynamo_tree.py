"""Run by peers.py where Dynamo is and nothing of ours: fills its radix tree, looks prompts up, prints JSON."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

from dynamo._core import RadixTree  # type: ignore[import-not-found]  # is in the other environment

BLOCKS_PER_PROMPT = 2000
BLOCKS_PER_EVENT = 500
QUERIES = 3000
KEPT_PROMPTS = 300


def main() -> None:
    num_blocks, num_nodes = int(sys.argv[1]), int(sys.argv[2])
    tree, chance, kept, seconds, told = RadixTree(), random.Random(1), [], 0.0, 0
    num_prompts = num_blocks // BLOCKS_PER_PROMPT
    for number in range(num_prompts):
        tokens = [chance.getrandbits(63) for _ in range(BLOCKS_PER_PROMPT)]
        if number % max(1, num_prompts // KEPT_PROMPTS) == 0:
            kept.append(tokens)
        for worker, payload in _events(number, tokens, num_nodes):
            started = time.perf_counter()
            tree.apply_event(worker, payload)
            seconds += time.perf_counter() - started
        told += _residencies(num_nodes)
    print(json.dumps({"announced_blocks_per_second": round(told / seconds), "match_2000_blocks": _ask(tree, kept)}))


def _shares(num_nodes: int) -> list[int]:
    return [BLOCKS_PER_PROMPT, BLOCKS_PER_PROMPT // 2, *[BLOCKS_PER_PROMPT // 10] * (num_nodes - 2)]


def _residencies(num_nodes: int) -> int:
    return sum(_shares(num_nodes))


def _events(number: int, tokens: list[int], num_nodes: int) -> Any:
    for place, share in enumerate(_shares(num_nodes)):
        for first in range(0, share, BLOCKS_PER_EVENT):
            end = min(first + BLOCKS_PER_EVENT, share)
            blocks = [{"block_hash": tokens[i] ^ 1, "tokens_hash": tokens[i]} for i in range(first, end)]
            stored = {"parent_hash": tokens[first - 1] ^ 1 if first else None, "blocks": blocks}
            event = {"event_id": number, "data": {"stored": stored}, "dp_rank": 0}
            yield (number + place) % num_nodes, json.dumps(event).encode()


def _ask(tree: Any, prompts: list[list[int]]) -> dict[str, float]:
    seconds = []
    for number in range(QUERIES + 100):
        asked = prompts[number % len(prompts)]
        started = time.perf_counter()
        found = tree.find_matches(asked)
        seconds.append(time.perf_counter() - started)
        assert max(found.scores.values()) == BLOCKS_PER_PROMPT, "every prompt is known"
    cuts = statistics.quantiles(seconds[100:], n=100)
    named = {"min": min(seconds[100:]), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds[100:])}
    return {f"{name}_microseconds": round(value * 1e6, 1) for name, value in named.items()}


if __name__ == "__main__":
    main()

"""Run by peers.py where Mooncake is and nothing of ours: fills a master with keys, asks it for prompts, prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mooncake  # type: ignore[import-not-found]  # is in the other environment
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

BLOCKS_PER_PROMPT = 2000
QUERIES = 500
KEPT_PROMPTS = 300
VALUE = bytes(64)
SEGMENT_BYTES, BUFFER_BYTES = 4 << 30, 1 << 28
START_SECONDS = 60.0
IS_THERE = 1


def main() -> None:
    num_prompts, rpc_port, metrics_port = int(sys.argv[1]) // BLOCKS_PER_PROMPT, sys.argv[2], sys.argv[3]
    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    binary.chmod(0o755)
    flags = [f"--rpc_port={rpc_port}", f"--metrics_port={metrics_port}"]
    master = subprocess.Popen([str(binary), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        print(json.dumps(_measure(_client(f"127.0.0.1:{rpc_port}"), num_prompts)), flush=True)
    finally:
        master.kill()
        master.wait()
    os._exit(0)  # Exit at once: the client would wait for a master that is gone.


def _client(master: str) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while True:
        store = MooncakeDistributedStore()
        if store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master) == 0:
            return store
        assert time.monotonic() < deadline, "the master takes no client"
        time.sleep(0.2)


def _measure(store: Any, num_prompts: int) -> dict[str, Any]:
    kept, seconds = [], 0.0
    for number in range(num_prompts):
        keys = [os.urandom(16).hex() for _ in range(BLOCKS_PER_PROMPT)]
        if number % max(1, num_prompts // KEPT_PROMPTS) == 0:
            kept.append(keys)
        started = time.perf_counter()
        assert store.put_batch(keys, [VALUE] * len(keys)) == 0, "the master takes all keys"
        seconds += time.perf_counter() - started
    return {
        "announced_blocks_per_second": round(num_prompts * BLOCKS_PER_PROMPT / seconds),
        "match_2000_blocks": _ask(store.batch_is_exist, kept),
    }


def _ask(look_up: Callable[[list[str]], list[int]], prompts: list[list[str]]) -> dict[str, float]:
    seconds = []
    for number in range(QUERIES + 20):
        asked = prompts[number % len(prompts)]
        started = time.perf_counter()
        found = look_up(asked)
        seconds.append(time.perf_counter() - started)
        assert found.count(IS_THERE) == BLOCKS_PER_PROMPT, "every prompt is known"
    cuts = statistics.quantiles(seconds[20:], n=100)
    named = {"min": min(seconds[20:]), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds[20:])}
    return {f"{name}_microseconds": round(value * 1e6, 1) for name, value in named.items()}


if __name__ == "__main__":
    main()

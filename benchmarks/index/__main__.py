"""`make bench AREA=index`: writes benchmarks/results/index.json. ARGS: [millions of blocks, each, such as 1 10]."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.index import in_process, over_grpc, peers, visibility
from tests.free_ports import free_address

RESULTS = Path(__file__).resolve().parent.parent / "results" / "index.json"
CLUSTERS = 8
LOOKUP_BARS = {(1, False): 60, (1, True): 100, (10, False): 100, (10, True): 150}  # microseconds, p50
FURTHER_HOLDER_BYTES = 3
BLOCK_BYTES = 16


def main() -> None:
    sizes = [float(size) for size in sys.argv[1:]] or [1, 10]
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average_at_start": round(os.getloadavg()[0], 1),
        "in_process": [_alone(size, hybrid=hybrid) for size in sizes for hybrid in (False, True)],
        "dynamo_radix_tree": peers.dynamo_radix_tree(1_000_000, CLUSTERS),
    }
    _save(results)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results["over_grpc"] = runner.run(over_grpc.measure(num_blocks=round(max(sizes) * 1_000_000), port=_port()))
        _save(results)
        results["event_to_visible"] = runner.run(visibility.measure((_port(), _port())))
    _save(results)
    print(json.dumps(results, indent=1))


def _port() -> int:
    return int(free_address().rpartition(":")[2])


def _save(results: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _alone(millions: float, *, hybrid: bool) -> dict[str, Any]:
    """In a process of its own, whose memory is this index's and nothing else's."""
    num_blocks = round(millions * 1_000_000)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(in_process.measure, num_blocks=num_blocks, num_nodes=CLUSTERS, hybrid=hybrid).result()
    further = found["residencies"] / found["blocks"] - 1
    found["bars"] = {
        "match_2000_blocks_p50_microseconds": LOOKUP_BARS.get((round(millions), hybrid)),
        "bytes_per_block": round(BLOCK_BYTES + FURTHER_HOLDER_BYTES * further, 1),
    }
    return found


if __name__ == "__main__":
    main()

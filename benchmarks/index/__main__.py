"""`make bench AREA=index`: writes benchmarks/results/index.json. ARGS name some of its parts."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.index import churn, holders, in_process, over_grpc, peers, recovery, visibility
from tools.free_ports import free_address

RESULTS = Path(__file__).resolve().parent.parent / "results" / "index.json"
CLUSTERS = 8
LOOKUP_BARS = {(1, False): 60, (1, True): 100, (10, False): 100, (10, True): 150}  # microseconds, p50
FURTHER_HOLDER_BYTES = 3
BLOCK_BYTES = 16
GRPC_BLOCKS = 10_000_000
HELD_BLOCKS = 4_000_000


def main() -> None:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    for name in sys.argv[1:] or PARTS:
        load_average = round(os.getloadavg()[0], 1)
        results[name] = PARTS[name]()
        results.setdefault("load_average_at_start", {})[name] = load_average
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({name: results[name]}, indent=1), flush=True)


def _in_process(millions: float) -> list[dict[str, Any]]:
    return [_alone(millions, hybrid=hybrid) for hybrid in (False, True)]


def _further_holders() -> list[dict[str, Any]]:
    return [_apart(holders.measure, num_blocks=HELD_BLOCKS, hybrid=hybrid) for hybrid in (False, True)]


def _churn() -> list[dict[str, Any]]:
    rate: dict[str, Any] = {"num_blocks": 1_000_000, "blocks_per_second": 100_000, "seconds": 60.0}
    return [_apart(churn.measure, **rate, shares_cell=shares_cell) for shares_cell in (False, True)]


def _dynamo_radix_tree() -> dict[str, Any]:
    """Dynamo's between two of ours, of the same shape and within a minute."""

    def index_run() -> Any:
        return _alone(1, hybrid=False)["match_2000_blocks"]

    return {"ours_before": index_run(), **peers.dynamo_radix_tree(1_000_000, CLUSTERS), "ours_after": index_run()}


def _over_grpc() -> dict[str, Any]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(over_grpc.measure(num_blocks=GRPC_BLOCKS, port=_port()))


def _event_to_visible() -> dict[str, Any]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(visibility.measure((_port(), _port())))


def _port() -> int:
    return int(free_address().rpartition(":")[2])


def _apart(measure: Callable[..., dict[str, Any]], **what: Any) -> dict[str, Any]:
    """In a process of its own, whose memory is that index and nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, **what).result()


def _alone(millions: float, *, hybrid: bool) -> dict[str, Any]:
    num_blocks = round(millions * 1_000_000)
    found = _apart(in_process.measure, num_blocks=num_blocks, num_nodes=CLUSTERS, hybrid=hybrid)
    further = found["residencies"] / found["blocks"] - 1
    found["bars"] = {
        "match_2000_blocks_p50_microseconds": LOOKUP_BARS.get((round(millions), hybrid)),
        "bytes_per_block": round(BLOCK_BYTES + FURTHER_HOLDER_BYTES * further, 1),
    }
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "in_process_1_million": partial(_in_process, 1),
    "in_process_10_million": partial(_in_process, 10),
    "dynamo_radix_tree": _dynamo_radix_tree,
    "mooncake_master": partial(peers.mooncake_master, 500_000),
    "lmcache_directory": partial(peers.lmcache_directory, 500_000, CLUSTERS),
    "llm_d_index": peers.llm_d_index,
    "over_grpc": _over_grpc,
    "event_to_visible": _event_to_visible,
    "further_holders": _further_holders,
    "churn": _churn,
    "recovery": recovery.measure,
}

if __name__ == "__main__":
    main()

"""`make bench AREA=index`: writes benchmarks/results/index.json. ARGS: [millions of blocks]."""

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

from benchmarks.index import in_process, over_grpc
from tests.free_ports import free_address

RESULTS = Path(__file__).resolve().parent.parent / "results" / "index.json"


def main() -> None:
    num_blocks = round(float(sys.argv[1] if len(sys.argv) > 1 else "1") * 1_000_000)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "in_process": [
            _alone(num_blocks, num_nodes, hybrid=hybrid) for num_nodes in (4, 8) for hybrid in (False, True)
        ],
    }
    port = int(free_address().rpartition(":")[2])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results["over_grpc"] = runner.run(over_grpc.measure(num_blocks=num_blocks, port=port))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def _alone(num_blocks: int, num_nodes: int, *, hybrid: bool) -> dict[str, Any]:
    """In a process of its own, whose memory is this index's and nothing else's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(in_process.measure, num_blocks=num_blocks, num_nodes=num_nodes, hybrid=hybrid).result()


if __name__ == "__main__":
    main()

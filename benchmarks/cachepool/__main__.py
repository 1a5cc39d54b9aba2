"""`make bench AREA=cachepool`: writes benchmarks/results/cachepool.json, or only some parts of it anew."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cachepool import arena, kills, operations, rebalancing, replay, ssd

RESULTS = Path(__file__).resolve().parent.parent / "results" / "cachepool.json"

PARTS: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "arena": lambda _: arena.measure(),
    "milliseconds_per_2000_blocks": lambda _: operations.measure(),
    "ssd": lambda _: ssd.measure(RESULTS.parent),
    "kills": lambda _: kills.measure(RESULTS.parent),
    "eviction": replay.measure,
    "rebalancing": lambda _: rebalancing.measure(),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cachepool", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="by default all")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format; by default one with its statistics")
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: item for name, item in results.items() if name in PARTS}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    for part in arguments.parts or PARTS:
        results[part] = PARTS[part](arguments.trace)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({part: results[part]}, indent=1), flush=True)


if __name__ == "__main__":
    main()

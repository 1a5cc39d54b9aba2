"""`make bench AREA=cachepool`: writes benchmarks/results/cachepool.json. ARGS: [trace file in Mooncake's format]."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.cachepool import operations, replay, ssd, trace

RESULTS = Path(__file__).resolve().parent.parent / "results" / "cachepool.json"
SEED = 1


def main() -> None:
    requests = trace.read(Path(sys.argv[1])) if len(sys.argv) > 1 else trace.generate(SEED)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "milliseconds_per_2000_blocks": operations.measure(),
        "ssd": ssd.measure(RESULTS.parent),
        "trace": {
            "source": sys.argv[1] if len(sys.argv) > 1 else f"generated, seed {SEED}",
            "num_requests": len(requests),
            "mean_input_tokens": round(sum(its.input_tokens for its in requests) / len(requests)),
        },
        "saved_ratio": replay.measure(requests),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

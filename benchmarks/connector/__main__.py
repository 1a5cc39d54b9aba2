"""`make bench AREA=connector`: writes benchmarks/results/connector.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.connector import copying, cost, distance
from benchmarks.connector.sites import running_sites
from tools.wan import Wan, WanShape, obstacle

RESULTS = Path(__file__).resolve().parent.parent / "results" / "connector.json"


def main() -> None:
    if reason := obstacle():
        print(f"time to first token over distance is skipped: an emulated link {reason}")
    else:
        _measure_engines()
    copying.main()


def _measure_engines() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-distance-") as directory,
        Wan(WanShape(1e9, distance.ROUND_TRIPS[0])) as wan,
        running_sites(Path(directory), wan) as sites,
    ):
        results = {
            "ttft_over_distance": distance.measure(sites),
            "hooks": cost.hooks(sites),
            "framing": cost.framing(sites),
        }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""`make bench AREA=connector`: writes benchmarks/results/connector.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.connector import copying, distance
from tools.wan import obstacle

RESULTS = Path(__file__).resolve().parent.parent / "results" / "connector.json"


def main() -> None:
    copying.main()
    results: dict[str, Any] = {}
    if reason := obstacle():
        print(f"time to first token over distance is skipped: an emulated link {reason}")
    else:
        results["ttft_over_distance"] = distance.measure()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""`make bench AREA=connector`: writes benchmarks/results/connector.json.

`make bench AREA=connector PARTS="distance slow_link"` measures these anew and leaves the others' figures as they are;
`ROUND_TRIPS="0.03"` does so with the links of `distance`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.connector import copying, cost, decode_steps, distance, slow_link
from benchmarks.connector.sites import running_sites
from tools.wan import Wan, WanShape, obstacle

RESULTS = Path(__file__).resolve().parent.parent / "results" / "connector.json"


def main() -> None:
    for name in os.environ.get("PARTS", " ".join(PARTS)).split():
        began = os.getloadavg()[0]
        found = PARTS[name]()
        machine = {"cores": len(os.sched_getaffinity(0)), "load_average": [began, os.getloadavg()[0]]}
        found |= {f"machine of {name}": machine}
        print(json.dumps(found, indent=1))
        RESULTS.write_text(json.dumps(dict(sorted((_read() | found).items())), indent=1) + "\n")


def _read() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def _distance() -> dict[str, Any]:
    if reason := obstacle():
        return _skipped("ttft_over_distance", reason)
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-distance-") as directory,
        Wan(WanShape(1e9, distance.ROUND_TRIPS[0])) as wan,
        running_sites(Path(directory), wan) as sites,
    ):
        chosen = [float(item) for item in os.environ.get("ROUND_TRIPS", "").split()] or distance.ROUND_TRIPS
        found = distance.measure(sites, chosen)
        return {"ttft_over_distance": distance.merged(found, _read().get("ttft_over_distance"))}


def _cost() -> dict[str, Any]:
    if reason := obstacle():
        return _skipped("cost", reason)
    return cost.measure()


def _slow_link() -> dict[str, Any]:
    if reason := obstacle():
        return _skipped("slow_link", reason)
    return {"slow_link": slow_link.measure()}


def _skipped(name: str, reason: str) -> dict[str, Any]:
    print(f"{name} is skipped: an emulated link {reason}")
    return {}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "distance": _distance,
    "cost": _cost,
    "decode_steps": lambda: {"decode_steps": decode_steps.measure()},
    "slow_link": _slow_link,
    "copying": lambda: {"copying": copying.measure()},
}


if __name__ == "__main__":
    main()

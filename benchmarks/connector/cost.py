"""Cost of the connector for the prefill engine, and framing overhead on the wire, from the logs of one run."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.connector.sites import CHUNK_TOKENS, FAMILY, Sites, logged, running_sites
from tools.wan import Wan, WanShape

NUM_PROMPTS = 6
BAR_HOOK_RATIO = 0.05  # Share of a prefill step's CPU time.
BAR_FRAMING_RATIO = 0.005  # Share of the payload.


def measure() -> dict[str, Any]:
    """Both, from prompts through both engines over a link that is no limit."""
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-cost-") as directory,
        Wan(WanShape(1e9, 0.002)) as wan,
        running_sites(Path(directory), wan, compares=False) as sites,
    ):
        for _ in range(NUM_PROMPTS):
            sites.pushed_seconds(sites.prefill)
        return {"hooks": hooks(sites), "framing": framing(sites)}


def hooks(sites: Sites) -> dict[str, Any]:
    """CPU time inside our hooks over the engine step's, for steps that compute a whole chunk; by thread clock."""
    steps = [item for item in logged(sites.prefill.child, "step.cost") if item["num_tokens"] == CHUNK_TOKENS]
    ratios = [step["hook_seconds"] / step["step_seconds"] for step in steps]
    spent, whole = (sum(step[name] for step in steps) for name in ("hook_seconds", "step_seconds"))
    return {
        "family": FAMILY,
        "chunk_tokens": CHUNK_TOKENS,
        "num_steps": len(steps),
        "step_milliseconds": round(1e3 * statistics.median(step["step_seconds"] for step in steps), 3),
        "ratio_of_sums": round(spent / whole, 4),
        "ratio": {
            name: round(of(ratios), 4) for name, of in (("median", statistics.median), ("min", min), ("max", max))
        },
        "bar": BAR_HOOK_RATIO,
    }


def framing(sites: Sites) -> dict[str, Any]:
    """Return bytes on the wire beyond the payload of the missing blocks, over all transfers of the run."""
    ended = [item for item in logged(sites.far.child, "transfer.complete") if item["direction"] == "out"]
    ratios = [item["wire_bytes"] / item["payload_bytes"] - 1 for item in ended]
    return {
        "num_transfers": len(ended),
        "payload_bytes": ended[-1]["payload_bytes"],
        "ratio": {"median": round(statistics.median(ratios), 5), "max": round(max(ratios), 5)},
        "bar": BAR_FRAMING_RATIO,
    }

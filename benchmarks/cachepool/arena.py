"""Start of a 64 GiB arena: time, and memory touched."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from benchmarks.cachepool.layouts import dense
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool

BUDGET_BYTES = 64 << 30
SLOT_BYTES = 64 << 10
BLOCK_TOKENS = 16
NUM_ROUNDS = 20
BAR_SECONDS = 2.0


def measure() -> dict[str, Any]:
    """Return seconds from nothing to a pool that gives out slots, and the bytes in memory then."""
    rounds = [_round() for _ in range(NUM_ROUNDS)]
    seconds = [item[0] for item in rounds]
    return {
        "bytes": BUDGET_BYTES,
        "start_seconds": {"median": round(median(seconds), 5), "max": round(max(seconds), 5)},
        "bar_seconds": BAR_SECONDS,
        "touched_bytes": max(item[1] for item in rounds),
    }


def _round() -> tuple[float, int]:
    started = time.perf_counter()
    pool = Pool(BUDGET_BYTES)
    arena: Arena = pool.arena(dense(BLOCK_TOKENS, slot_bytes=SLOT_BYTES))
    seconds, touched = time.perf_counter() - started, os.fstat(arena.fd).st_blocks * 512
    pool.close()
    return seconds, touched

"""Cost of allocating, publishing, matching and releasing the 2,000 blocks of one prompt."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.cachepool.layouts import ATTENTION, SLOT_BYTES, dense
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.capacity import TenantShares
from prfaas.cachepool.pool import Pool
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity

NUM_BLOCKS = 2_000
BLOCK_TOKENS = 16
NUM_ROUNDS = 60
NUM_WARM_UP = 10
BAR_MILLISECONDS = 1.0
STEPS = ("allocate", "publish", "match", "release")


def measure() -> dict[str, Any]:
    """Milliseconds of processor time per 2,000 blocks: while the pool fills, and once every block evicts another."""
    filling, full = NUM_ROUNDS + NUM_WARM_UP, 4
    return {
        "bar": BAR_MILLISECONDS,
        "filling": _rounds(filling),
        "full": _rounds(full),
    }


def _rounds(num_prompts: int) -> dict[str, Any]:
    pool = Pool((num_prompts + 2) * NUM_BLOCKS * SLOT_BYTES * 2, shares=TenantShares(learns=True))
    arena = pool.arena(dense(BLOCK_TOKENS))
    rounds = [_round(pool, arena) for _ in range(NUM_ROUNDS + NUM_WARM_UP)][NUM_WARM_UP:]
    check_integrity(pool)
    pool.close()
    together = sorted(sum(item) for item in rounds)
    per_step = {name: round(median(item[step] for item in rounds) * 1e3, 3) for step, name in enumerate(STEPS)}
    figures = {"median": median(together), "min": together[0], "max": together[-1]}
    return per_step | {name: round(value * 1e3, 3) for name, value in figures.items()}


def _round(pool: Pool, arena: Arena) -> list[float]:
    hashes = [BlockHash(os.urandom(16)) for _ in range(NUM_BLOCKS)]
    lease = pool.open_lease()
    marks = [time.process_time()]
    run = pool.allocate(arena, 0, NUM_BLOCKS, lease)
    marks.append(time.process_time())
    assert run is not None
    pool.publish_run(arena, run, group=ATTENTION, hashes=hashes, parent=BlockHash(bytes(16)), num_tokens=BLOCK_TOKENS)
    marks.append(time.process_time())
    found = pool.find_all(arena, ATTENTION, hashes)
    marks.append(time.process_time())
    pool.end_lease(lease)
    marks.append(time.process_time())
    assert found == run
    return [after - before for before, after in pairwise(marks)]

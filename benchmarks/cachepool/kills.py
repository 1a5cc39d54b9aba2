"""A writer of the SSD tier is killed again and again: how much of what it had finished is there, and whole, afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prfaas.pool_events import BlockStored
from prfaas.types import BlockHash
from tests.integration.cachepool.ssd_writer import live_and_die
from tests.support.ssd_tier import Tier, content_of

NUM_KILLS = 200
BAR_RATIO = 0.99
SEED = 3


def measure(directory: Path) -> dict[str, Any]:
    """Blocks that were finished, survived and were served torn or wrong, over all kills."""
    rng, finished = random.Random(SEED), set[BlockHash]()
    num_wrong = num_read = num_announced = 0
    with TemporaryDirectory(dir=directory, suffix=".tmp") as here:
        for life in range(NUM_KILLS):
            finished |= live_and_die(Path(here), life, rng.randrange(1, 60))
            tier = Tier(Path(here))
            told = {event.block_hash for event in tier.events if isinstance(event, BlockStored)}
            for block_hash in rng.sample(sorted(told), min(100, len(told))):
                num_wrong += tier.read(block_hash) != content_of(block_hash)
                num_read += 1
            num_announced = len(told & finished)
            tier.close()
    return {
        "num_kills": NUM_KILLS,
        "finished_blocks": len(finished),
        "announced_after_the_last": num_announced,
        "surviving_ratio": round(num_announced / len(finished), 5),
        "bar_ratio": BAR_RATIO,
        "blocks_read": num_read,
        "torn_or_wrong": num_wrong,
    }

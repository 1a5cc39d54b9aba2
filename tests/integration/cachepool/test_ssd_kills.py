"""A writer is killed at random moments: no torn or wrong block is ever served, and what was complete is there again."""

import random
from pathlib import Path

import pytest

from prfaas.pool_events import BlockStored
from prfaas.types import BlockHash
from tests.integration.cachepool.ssd_writer import live_and_die
from tests.support.ssd_tier import Tier, content_of

SURVIVING_RATIO = 0.99


def _check(directory: Path, written: set[BlockHash], rng: random.Random, *, num_read: int) -> None:
    tier = Tier(directory)
    told = [event.block_hash for event in tier.events if isinstance(event, BlockStored)]
    assert len(told) == len(set(told))
    assert len(written & set(told)) >= SURVIVING_RATIO * len(written)
    for block_hash in rng.sample(sorted(told), min(num_read, len(told))):
        assert tier.read(block_hash) == content_of(block_hash), "what is announced is there, whole"
    tier.close()


def _kill(directory: Path, *, num_kills: int, num_read: int, seed: int) -> None:
    rng, written = random.Random(seed), set[BlockHash]()
    for life in range(num_kills):
        written |= live_and_die(directory, life, rng.randrange(1, 60))
        _check(directory, written, rng, num_read=num_read)
    assert written


def test_no_kill_leaves_a_torn_block_or_loses_a_complete_one(tmp_path: Path) -> None:
    _kill(tmp_path, num_kills=4, num_read=1_000, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills_leave_no_torn_block(tmp_path: Path) -> None:
    _kill(tmp_path, num_kills=200, num_read=300, seed=2)

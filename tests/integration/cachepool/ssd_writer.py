"""A process that writes chains to an SSD tier until it is killed: DIRECTORY FIRST; prints each hash once it is there."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from prfaas.events import BlockStored
from tests.integration.cachepool.tier import Tier
from tests.unit.cachepool.layouts import name

CHAIN_BLOCKS = 8


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    tier = Tier(Path(sys.argv[1]), memory_slots=32)
    num_told = len(tier.events)
    _say("ready")
    for first in count(int(sys.argv[2]), CHAIN_BLOCKS):
        tier.keep([name(number) for number in range(first, first + CHAIN_BLOCKS)])
        tier.settle()
        stored = [event for event in tier.events[num_told:] if isinstance(event, BlockStored)]
        num_told = len(tier.events)
        _say("\n".join(event.block_hash.hex() for event in stored))


if __name__ == "__main__":
    main()

"""A process that writes chains to an SSD tier until it is killed, and its killer."""

import subprocess
import sys
from itertools import count
from pathlib import Path

from prfaas.pool_events import BlockStored
from prfaas.types import BlockHash
from tests.support.pool_layouts import name
from tests.support.ssd_tier import Tier

CHAIN_BLOCKS = 8
BLOCKS_PER_LIFE = 1_000_000  # Each life writes different blocks.


def live_and_die(directory: Path, life: int, num_lines: int) -> set[BlockHash]:
    """Kill a writer after it has said that many lines; the blocks that it said were there."""
    command = [
        sys.executable,
        "-m",
        "tests.integration.cachepool.ssd_writer",
        str(directory),
        str(life * BLOCKS_PER_LIFE),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(num_lines)]
        writer.kill()
        lines += writer.stdout.readlines()
    assert lines[0] == b"ready\n"
    return {BlockHash(bytes.fromhex(line.decode())) for line in lines[1:] if len(line) == 33}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """DIRECTORY FIRST: print each block's hash once it is there."""
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

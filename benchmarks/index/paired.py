"""Look-ups of this tree beside those of another commit's tree, in turns, on equal indexes.

    git worktree add /tmp/base COMMIT
    python -m benchmarks.index.paired /tmp/base [PAIRS]

Each tree fills an index once in a process of its own. Then both answer the same number of queries in turns, so that
changes of the machine's speed reach both. Prints the ratios of the medians of the processor time, this tree over the other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

NUM_BLOCKS, NUM_NODES = 400_000, 8
PAIRS = 9
HERE = Path(__file__).parents[2]
# Runs in either tree: the benchmark's functions have kept their names.
WORKER = """
import json, sys, time
from benchmarks.index import in_process
kept = []
ask = in_process._ask
in_process._ask = lambda index, prompts, clock: kept.append((index, prompts)) or {}
in_process.measure(num_blocks=NUM_BLOCKS, num_nodes=NUM_NODES, hybrid=HYBRID)
index, prompts = kept[0]
for _ in sys.stdin:
    print(json.dumps(ask(index, prompts, time.thread_time)["p50_microseconds"]), flush=True)
"""


class Worker:
    """Process that answers queries from one tree's index."""

    def __init__(self, tree: Path, *, hybrid: bool) -> None:
        constants = f"NUM_BLOCKS, NUM_NODES, HYBRID = {NUM_BLOCKS}, {NUM_NODES}, {hybrid}\n"
        command = [sys.executable, "-c", constants + WORKER]
        self._process = subprocess.Popen(
            command, cwd=tree, env={"PYTHONPATH": str(tree)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> float:
        """Return the median microseconds of a look-up."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Compare both kinds of model."""
    base, pairs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS
    for hybrid in (False, True):
        workers = [Worker(HERE, hybrid=hybrid), Worker(base, hybrid=hybrid)]
        for worker in workers:
            worker.ask()
        found = []
        for number in range(pairs):
            turn = [worker.ask() for worker in (workers if number % 2 else workers[::-1])]
            found.append(tuple(turn if number % 2 else turn[::-1]))
        for worker in workers:
            worker.close()
        ratios = [here / there for here, there in found]
        medians = [round(statistics.median(column), 1) for column in zip(*found, strict=True)]
        summary = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        rounded = {name: round(ratio, 3) for name, ratio in summary.items()}
        print(json.dumps({"hybrid": hybrid, "microseconds_here_and_there": medians, "ratio": rounded}), flush=True)


if __name__ == "__main__":
    main()

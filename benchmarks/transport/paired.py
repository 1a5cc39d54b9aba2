"""This checkout beside another over an emulated link: the same transfer in turns, so that noise meets both alike.

`python -m benchmarks.transport.paired CHECKOUT [PROFILE [PAIRS]]` prints the ratio of the rates of each pair, and their
median, minimum and maximum. Needs root. The other checkout runs in this environment.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
# Runs in either checkout: one transfer of 1 GiB for each line of input. The module of `Ends` had another name.
_TRANSFERS = """
import sys
try:
    from benchmarks.transport.link_ends import Ends
except ImportError:
    from benchmarks.transport.ours import Ends
from tools.wan import PROFILES, Wan
with Wan(PROFILES[sys.argv[1]]) as wan, Ends(wan) as ends:
    for _ in sys.stdin:
        print(ends.transfer(1 << 30, num_layers=64).seconds, flush=True)
"""


@contextlib.contextmanager
def _transfers(checkout: Path, profile: str) -> Iterator[Callable[[], float]]:
    """Yield the function that runs one transfer and returns its seconds. The first transfer has warmed the link."""
    child = subprocess.Popen(
        [sys.executable, "-c", _TRANSFERS, profile],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    requests, answers = child.stdin, child.stdout

    def run() -> float:
        requests.write("\n")
        requests.flush()
        return float(answers.readline())

    try:
        run()
        yield run
    finally:
        requests.close()
        child.wait()


def main() -> None:
    checkout, profile = Path(sys.argv[1]), (sys.argv[2:3] or ["regional"])[0]
    num_pairs = int((sys.argv[3:4] or ["6"])[0])
    ratios = []
    with _transfers(HERE, profile) as present, _transfers(checkout, profile) as compared:
        for number in range(num_pairs):
            first, second = (present, compared) if number % 2 else (compared, present)
            seconds = {first: first(), second: second()}
            ratios.append(seconds[compared] / seconds[present])
            print(
                f"{profile}: {seconds[present]:.2f} s, other {seconds[compared]:.2f} s, rate {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"{profile}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()

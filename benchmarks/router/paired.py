"""This checkout beside another: CPU time of a request and of a decision, in turns, so that noise meets both alike.

`python -m benchmarks.router.paired CHECKOUT [ROUNDS]` prints the ratios: median, least and greatest of all rounds.
The other checkout runs in this environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.router import door

HERE = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 1_000_000
NUM_REQUESTS = 1000
# In the child: one round of decisions for each line of input. Both checkouts have `_measure` and `_decide`.
_DECISIONS = f"""
import sys
from benchmarks.router import decision
decide = decision._decide
def one_round(routing, requests):
    sys.stdin.readline()
    seconds = decide(routing, requests)
    print(sum(seconds) / len(seconds), flush=True)
    return seconds
decision._decide, decision.NUM_ROUNDS = one_round, 1 << 30
decision._measure({NUM_BLOCKS}, hybrid=bool(int(sys.argv[1])))
"""


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


@contextlib.contextmanager
def _decider(checkout: Path, *, hybrid: bool) -> Iterator[Callable[[], float]]:
    """Yield the function that runs one round, and returns its mean CPU time."""
    command = [sys.executable, "-c", _DECISIONS, str(int(hybrid))]
    child = subprocess.Popen(
        command,
        cwd=checkout,
        env=_environment(checkout),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:

        def run() -> float:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        run()
        yield run
    finally:
        child.kill()
        child.wait()


def _decisions(base: Path, rounds: int, *, hybrid: bool) -> list[float]:
    with _decider(HERE, hybrid=hybrid) as new, _decider(base, hybrid=hybrid) as old:
        return [_ratio(number, new, old) for number in range(rounds)]


def _ratio(number: int, new: Callable[[], float], old: Callable[[], float]) -> float:
    """Return the ratio of one round, in which each begins in turn."""
    if number % 2:
        first = new()
        return first / old()
    first = old()
    return new() / first


async def _requests(base: Path, rounds: int) -> dict[str, list[float]]:
    """Return the ratios of the CPU time of a request, by load. Both routers ask the same engines."""
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        async with door.engines(Path(made)) as behind, contextlib.AsyncExitStack() as stack:
            routers = []
            for name, checkout in (("new", HERE), ("old", base)):
                directory = Path(made) / name
                directory.mkdir()
                with contextlib.chdir(checkout):  # Modules of the current folder come first.
                    routers.append(await stack.enter_async_context(door.router(directory, behind)))
            for number in range(rounds + 1):  # The first round warms up.
                for name, body in (("short prompts", door.SHORT), ("prefill and decode", door.LONG)):
                    seconds = [0.0, 0.0]
                    for which in (0, 1) if number % 2 else (1, 0):
                        run = await door.load(*routers[which], body, connections=16, num=NUM_REQUESTS)
                        seconds[which] = run.cpu_seconds
                    if number:
                        ratios.setdefault(name, []).append(seconds[0] / seconds[1])
    return ratios


def main() -> None:
    """Print one line for each load."""
    base, rounds = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    ratios = asyncio.run(_requests(base, rounds))
    for hybrid in (False, True):
        ratios[f"decision, {'hybrid' if hybrid else 'attention only'}"] = _decisions(base, rounds, hybrid=hybrid)
    for name, values in ratios.items():
        spread = f"least {min(values):.3f}, greatest {max(values):.3f}"
        print(f"{name}: {statistics.median(values):.3f} times the CPU time ({spread}, {len(values)} rounds)")


if __name__ == "__main__":
    main()

"""Steady mixed load: memory, threads and descriptors of every process stay the same, and logs grow by request only."""

import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.open_loop import OpenLoop
from tests.support.replicated_deployment import ReplicatedDeployment, running_replicated, until_sums_agree
from tools.processes import Child

INTERVAL_SECONDS = 0.25
FILLING_INTERVAL_SECONDS = 0.1  # Managers keep the last 4,096 transfers, and are to have them before the measurement.
LENGTHS = (100, 512, 180, 1024, 768)
POOL_BYTES = "48MiB"  # Full within the time that is not measured.
MIB = 1 << 20
# Connections to engines are kept, so a new router has more with each busier moment. A leak would be one a request, or 48.
MAX_MORE_WHILE_NEW = 12
REDIS_BYTES = 2 * 80 * MIB  # Of two clusters.


@dataclass(frozen=True)
class Figures:
    """Figures of one process at one moment. The pool's memory, which processes share, does not count."""

    private_bytes: int
    num_threads: int
    num_descriptors: int
    log_bytes: int


def _figures(child: Child) -> Figures:
    directory = Path(f"/proc/{child.process.pid}")
    status = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines())
    private_bytes = int(status["RssAnon"].split()[0]) << 10
    num_descriptors = len(list((directory / "fd").iterdir()))
    return Figures(private_bytes, int(status["Threads"]), num_descriptors, child.log.stat().st_size)


async def _sample(site: ReplicatedDeployment, *, seconds: float, every_seconds: float) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = defaultdict(list)
    for _ in range(round(seconds / every_seconds)):
        await asyncio.sleep(every_seconds)
        for name, child in site.processes.items():
            found[name].append(_figures(child))
    return found


def _growth(values: Sequence[float]) -> float:
    """Return by how much a straight line through the values rises from the first to the last."""
    return statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)


def _least_growth(values: Sequence[int]) -> int:
    """Return by how much the least value of the last third exceeds that of the first. Bursts of requests do not count."""
    third = max(1, len(values) // 3)
    return min(values[-third:]) - min(values[:third])


def _check(
    found: Mapping[str, Sequence[Figures]], num_requests: int, *, max_growth_bytes: float, max_more: int
) -> None:
    grown = []
    for name, figures in sorted(found.items()):
        private = _growth([item.private_bytes for item in figures])
        threads = _least_growth([item.num_threads for item in figures])
        descriptors = _least_growth([item.num_descriptors for item in figures])
        log_bytes = (figures[-1].log_bytes - figures[0].log_bytes) / num_requests
        sys.stdout.write(
            f"\n{name:12} {figures[-1].private_bytes / MIB:7.1f} MiB ({private / MIB:+.2f}), "
            f"{figures[-1].num_threads} threads ({threads:+d}), "
            f"{figures[-1].num_descriptors} descriptors ({descriptors:+d}), {log_bytes:.0f} log bytes a request"
        )
        # Managers cut the streams in Redis when they have 64 MiB.
        max_growth = REDIS_BYTES if name == "redis" else max_growth_bytes
        if private > max_growth or max(threads, descriptors) > max_more:
            grown.append(name)
    assert grown == []


async def _run(
    site: ReplicatedDeployment, *, unmeasured_seconds: float, seconds: float, max_growth_bytes: float, max_more: int
) -> None:
    filling = OpenLoop(site.router_url, interval_seconds=FILLING_INTERVAL_SECONDS, lengths=LENGTHS, seed=1)
    load = OpenLoop(site.router_url, interval_seconds=INTERVAL_SECONDS, lengths=LENGTHS, seed=2)
    async with filling.running():
        await asyncio.sleep(unmeasured_seconds)
    async with load.running():
        before = load.num_asked
        found = await _sample(site, seconds=seconds, every_seconds=seconds / 90)
        num_requests = load.num_asked - before
    _check(found, num_requests, max_growth_bytes=max_growth_bytes, max_more=max_more)
    assert [answer.outcome for answer in filling.answers + load.answers if not answer.outcome.is_whole] == []
    await until_sums_agree(site)


@pytest.mark.timeout(200)
async def test_threads_and_descriptors_stay_the_same_under_load(tmp_path: Path) -> None:
    with running_replicated(tmp_path, pool_bytes=POOL_BYTES) as site:
        await _run(site, unmeasured_seconds=5.0, seconds=15.0, max_growth_bytes=64 * MIB, max_more=MAX_MORE_WHILE_NEW)


@pytest.mark.soak
@pytest.mark.timeout(2400)
async def test_nothing_grows_for_half_an_hour(tmp_path: Path) -> None:
    with running_replicated(tmp_path, pool_bytes=POOL_BYTES) as site:
        await _run(site, unmeasured_seconds=720.0, seconds=1440.0, max_growth_bytes=2 * MIB, max_more=3)

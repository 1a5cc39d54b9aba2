"""The SSD tier beside fio with the same pattern on the same disk: whole slots at random places, past the page cache."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cachepool.layouts import ATTENTION, dense
from prfaas.cachepool.arena import PAGE_BYTES
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.pool_events import PoolChange
from prfaas.types import BlockHash

BLOCK_TOKENS = 16
SLOT_BYTES = 2 << 20
NUM_BLOCKS = 256
NUM_THREADS = 8
NUM_ROUNDS = 9
BAR_RATIO = 0.8  # Ratio to fio.
_ROOT = BlockHash(bytes(16))


def measure(directory: Path) -> dict[str, Any]:
    """Gigabytes per second, and the ratios to fio round by round; fio's part is absent where fio is."""
    rounds = [_round(directory) for _ in range(NUM_ROUNDS)]
    result: dict[str, Any] = {"slot_bytes": SLOT_BYTES, "num_blocks": NUM_BLOCKS, "num_threads": NUM_THREADS}
    for way in ("write", "read"):
        result[way] = {"gigabytes_per_second": _spread([item[way] for item in rounds])}
        if shutil.which("fio"):
            result[way]["fio"] = _spread([item[f"fio_{way}"] for item in rounds])
            result[way]["ratio_to_fio"] = _spread([item[way] / item[f"fio_{way}"] for item in rounds])
            result[way]["bar_ratio"] = BAR_RATIO
    return result


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def _round(directory: Path) -> dict[str, float]:
    """Ours and fio's in turn, so that both see the disk as it is in the same seconds."""
    with tempfile.TemporaryDirectory(dir=directory, suffix=".tmp") as here:
        rates = _tier_rates(Path(here))
        for way in ("write", "read") if shutil.which("fio") else ():
            rates[f"fio_{way}"] = _fio(Path(here), way)
    return rates


def _tier_rates(directory: Path) -> dict[str, float]:
    calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
    changes: list[PoolChange] = []
    memory = Pool(4 * NUM_BLOCKS * SLOT_BYTES, on_change=changes.append)
    arena = memory.arena(dense(BLOCK_TOKENS, slot_bytes=SLOT_BYTES))
    ssd = SsdTier(
        directory,
        2 * NUM_BLOCKS * SLOT_BYTES,
        memory,
        post=lambda function, *arguments: calls.put((function, arguments)),
        on_change=lambda change: None,
    )

    def finish() -> None:
        while not ssd.is_idle():
            function, arguments = calls.get(timeout=60)
            function(*arguments)

    lease = memory.open_lease()
    slots = memory.allocate(arena, 0, NUM_BLOCKS, lease)
    hashes = [BlockHash(os.urandom(16)) for _ in range(NUM_BLOCKS)]
    assert slots is not None
    for slot in slots:
        arena.slot_view(slot)[:] = os.urandom(4096) * (SLOT_BYTES // 4096)
    memory.publish_run(arena, slots, group=ATTENTION, hashes=hashes, parent=_ROOT, num_tokens=BLOCK_TOKENS)
    for change in changes:
        ssd.offer(change)
    rates = {"write": _rate(ssd.pump, finish)}
    target = memory.allocate(arena, 0, NUM_BLOCKS, lease)
    assert target is not None
    for slot in target:  # Touch all pages, as in a pool that has been in use.
        arena.slot_view(slot)[::PAGE_BYTES] = bytes(SLOT_BYTES // PAGE_BYTES)
    whole: list[bool] = []

    def read_all() -> None:
        for block_hash, slot in zip(hashes, target, strict=True):
            block = BlockIdentity(ATTENTION, block_hash, _ROOT, BLOCK_TOKENS, _ROOT)
            ssd.read(arena.layout, block, arena.slot_view(slot), whole.append)
        ssd.pump()

    rates["read"] = _rate(read_all, finish)
    assert whole == [True] * NUM_BLOCKS
    ssd.close()
    memory.close()
    return rates


def _rate(*steps: Callable[[], None]) -> float:
    """Gigabytes per second at which all blocks are moved."""
    started = time.perf_counter()
    for step in steps:
        step()
    return NUM_BLOCKS * SLOT_BYTES / 1e9 / (time.perf_counter() - started)


def _fio(directory: Path, way: str) -> float:
    """Return the same slots of one file by as many threads, each slot once."""
    share = NUM_BLOCKS // NUM_THREADS * SLOT_BYTES
    job = ["--ioengine=psync", "--direct=1", f"--bs={SLOT_BYTES}", f"--numjobs={NUM_THREADS}", "--thread"]
    where = [f"--filename={directory / 'fio'}", f"--filesize={NUM_BLOCKS * SLOT_BYTES}", f"--offset_increment={share}"]
    what = [f"--rw=rand{way}", f"--size={share}", f"--io_size={share}", "--fallocate=none", "--group_reporting"]
    command = ["fio", "--name=slots", "--output-format=json", *job, *where, *what]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return float(answer["jobs"][0][way]["bw_bytes"]) / 1e9

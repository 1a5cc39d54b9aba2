"""`python -m benchmarks.colocate [--device cuda]`: throughput and ITL of both modes in one run, as JSON.

On a GPU: hybrid-8b in bfloat16, prompts of 16K tokens, batch 64, chunks of 512, 1K and 2K. On a CPU everything is
smaller and says nothing of a GPU; it shows that the comparison runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.colocate.workload import Figures, Workload
from prfaas.colocate import device
from prfaas.colocate.cache import CacheShape
from prfaas.colocate.lockstep import Lockstep
from prfaas.colocate.messages import NO_STOP_TOKEN, Request
from prfaas.colocate.shape import SHAPES, prefill_flops
from prfaas.colocate.supervisor import ExecutorSettings, Supervisor
from prfaas.model.colocation import Colocation
from prfaas.solve.profile_file import read_colocation
from tests.waiting import until


@dataclass(frozen=True)
class Setting:
    """One device's benchmark."""

    device: str
    shape: str
    dtype: str
    block_tokens: int
    workload: Workload
    chunks: tuple[int, ...]
    long_prompt_tokens: int  # of the one prefill during which the ITL of a full batch is taken
    partition: str
    matrix_size: int

    @property
    def max_tokens(self) -> int:
        return max(self.workload.prompt_tokens + self.workload.answer_tokens, self.long_prompt_tokens) + 64

    @property
    def cache(self) -> CacheShape:
        blocks = -(-self.max_tokens // self.block_tokens)
        return CacheShape(
            1 + (self.workload.concurrency + 2) * (blocks + 1), self.block_tokens, self.workload.concurrency + 3
        )


CPU = Setting("cpu", "small", "float32", 16, Workload(24, 8, 512, 48), (64, 128, 256), 2048, "affinity", 1024)
GPU = Setting(
    "cuda",
    "hybrid-8b",
    "bfloat16",
    256,
    Workload(256, 64, 16384, 1024),
    (512, 1024, 2048),
    16384,
    "green_contexts",
    8192,
)


async def colocated(setting: Setting, table: Colocation | None, itl_slo_seconds: float) -> dict[str, object]:
    """The executor under the workload, then one long prompt into a full batch."""
    settings = ExecutorSettings(
        shape=setting.shape,
        cache=setting.cache,
        max_rows=setting.workload.concurrency,
        max_tokens=setting.max_tokens,
        device=setting.device,
        dtype=setting.dtype,
        partition=setting.partition if table else "none",
        profile=table.decode if table else None,
        itl_slo_seconds=itl_slo_seconds,
        num_threads=1 if setting.device == "cpu" else 0,
    )
    async with Supervisor(settings) as executor:
        await _drive(executor, Workload(setting.workload.concurrency, setting.workload.concurrency, 64, 8))  # warm
        result: dict[str, object] = dict(await _drive(executor, setting.workload))
        result["long_prefill"] = await _long_prefill(executor, setting)
        return result


async def _drive(executor: Supervisor, workload: Workload) -> dict[str, float]:
    figures, requests = Figures(), iter(range(workload.num_requests))

    async def client() -> None:
        for request in requests:
            figures.start(request, time.perf_counter())
            async for _ in executor.generate(workload.prompt(request), workload.answer_tokens):
                figures.arrivals[request].append(time.perf_counter())

    await asyncio.gather(*(client() for _ in range(workload.concurrency)))
    return figures.summary(answer_tokens=workload.answer_tokens)


async def _long_prefill(executor: Supervisor, setting: Setting) -> dict[str, float]:
    """ITL of a batch of short requests while one long prompt is prefilled, and how long that took."""
    rows, gaps, running = setting.workload.concurrency - 1, [], asyncio.Event()
    ended = asyncio.Event()

    async def decoder(number: int) -> None:
        last = None
        async for _ in executor.generate(setting.workload.prompt(number)[:128], setting.max_tokens - 192):
            now = time.perf_counter()
            if last is not None and running.is_set():
                gaps.append(now - last)
            last = now
            if ended.is_set():
                return

    decoders = [asyncio.ensure_future(decoder(number)) for number in range(rows)]
    await until(lambda: executor.status()["decode_batch"] == rows, seconds=300, what="a full batch")
    started = time.perf_counter()
    running.set()
    prompt = tuple(i % 256 for i in range(setting.long_prompt_tokens))
    async for _ in executor.generate(prompt, 1):
        seconds = time.perf_counter() - started
    running.clear()
    ended.set()
    await asyncio.gather(*decoders)
    return _long_figures(gaps, seconds, setting)


def _long_figures(gaps: list[float], seconds: float, setting: Setting) -> dict[str, float]:
    gaps = sorted(gaps)
    flops = prefill_flops(SHAPES[setting.shape], setting.long_prompt_tokens)
    return {
        "prefill_seconds": seconds,
        "prefill_flops_per_second": flops / seconds,
        "itl_p50_seconds": gaps[len(gaps) // 2],
        "itl_p99_seconds": gaps[int(len(gaps) * 0.99)],
        "itl_max_seconds": gaps[-1],
    }


class Baseline:
    """Chunked hybrid batching under the same requests."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        shared = device.allocate(setting.shape, setting.cache, dtype=setting.dtype, device=setting.device, seed=1)
        tensors = (shared[0].tensor, shared[1].tensor, shared[2].tensor)
        self.model = device.model_on(setting.shape, setting.cache, tensors, max_tokens=setting.max_tokens)

    def lockstep(self, chunk_tokens: int) -> Lockstep:
        setting = self.setting
        max_blocks = setting.cache.blocks_for(setting.max_tokens)
        rows = setting.workload.concurrency
        return Lockstep(self.model, setting.cache, chunk_tokens=chunk_tokens, max_rows=rows, max_blocks=max_blocks)

    def run(self, chunk_tokens: int) -> dict[str, object]:
        warm = Workload(self.setting.workload.concurrency, self.setting.workload.concurrency, 64, 8)
        self._drive(self.lockstep(chunk_tokens), warm)
        result: dict[str, object] = dict(self._drive(self.lockstep(chunk_tokens), self.setting.workload))
        result["long_prefill"] = self._long_prefill(self.lockstep(chunk_tokens))
        return result

    def _drive(self, lockstep: Lockstep, workload: Workload) -> dict[str, float]:
        figures, sent = Figures(), 0
        live = 0
        while sent < workload.num_requests or live:
            while live < workload.concurrency and sent < workload.num_requests:
                figures.start(sent, time.perf_counter())
                lockstep.add(Request(sent, 0, workload.answer_tokens, NO_STOP_TOKEN, workload.prompt(sent)))
                sent, live = sent + 1, live + 1
            for request, _ in lockstep.step():
                figures.arrivals[request].append(time.perf_counter())
                live -= len(figures.arrivals[request]) == workload.answer_tokens
        return figures.summary(answer_tokens=workload.answer_tokens)

    def _long_prefill(self, lockstep: Lockstep) -> dict[str, float]:
        setting = self.setting
        rows = setting.workload.concurrency - 1
        for number in range(rows):
            prompt = setting.workload.prompt(number)[:128]
            lockstep.add(Request(number, 0, setting.max_tokens - 192, NO_STOP_TOKEN, prompt))
        decoding: set[int] = set()
        while len(decoding) < rows:
            decoding |= {request for request, _ in lockstep.step()}
        last: dict[int, float] = {}
        gaps = []
        started = time.perf_counter()
        prompt = tuple(i % 256 for i in range(setting.long_prompt_tokens))
        lockstep.add(Request(rows, 0, 1, NO_STOP_TOKEN, prompt))
        while True:
            answers = dict(lockstep.step())
            now = time.perf_counter()
            gaps += [now - last[request] for request in answers if request in last]
            last |= dict.fromkeys(answers, now)
            if rows in answers:
                return _long_figures(gaps, now - started, setting)


def matrix_peak(setting: Setting) -> float:
    """Floating-point operations per second of one large product on random data, the best of three medians of five."""
    size, dtype = setting.matrix_size, torch.bfloat16 if setting.device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=setting.device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(5):
            product = a @ b
        product[0, 0].item()
        best = min(best, (time.perf_counter() - started) / 5)
    return 2.0 * size**3 / best


def _device_name(setting: Setting) -> str:
    if setting.device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--profile", type=Path, help="a measured profile: adds the executor with adaptive shares")
    parser.add_argument("--itl-slo-seconds", type=float, default=0.03)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    setting = GPU if arguments.device == "cuda" else CPU
    results: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": _device_name(setting),
        "torch": torch.__version__,
        "setting": asdict(setting),
        "matrix_peak_flops_per_second": matrix_peak(setting),
        "overallocated": asyncio.run(colocated(setting, None, arguments.itl_slo_seconds)),
    }
    if arguments.profile:
        table = read_colocation(arguments.profile)
        results["adaptive"] = asyncio.run(colocated(setting, table, arguments.itl_slo_seconds))
    baseline = Baseline(setting)
    for chunk_tokens in setting.chunks:
        results[f"lockstep_{chunk_tokens}"] = baseline.run(chunk_tokens)
    best = max(results[f"lockstep_{chunk}"]["requests_per_second"] for chunk in setting.chunks)  # type: ignore[index]
    ours = [results[name]["requests_per_second"] for name in ("overallocated", "adaptive") if name in results]  # type: ignore[index]
    results["throughput_over_best_lockstep"] = max(ours) / best
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

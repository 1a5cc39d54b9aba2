"""`make bench AREA=colocate`: the executor and chunked baselines in turn, in one run, as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.colocate import executor
from benchmarks.colocate.lockstep import Baseline
from benchmarks.colocate.setting import CPU, Setting
from prfaas.colocate.processes.shared_memory import SIDES
from prfaas.colocate.processes.supervisor import Supervisor
from prfaas.model.cost.colocation import Colocation, ShareTable
from prfaas.scheduler.colocation import PartitionState, SharingPolicy, StepLoad, next_sharing
from prfaas.solve.files.profile_file import read_colocation

RESULTS = Path(__file__).resolve().parent.parent / "results" / "colocate.json"
Round = dict[str, Any]


async def rounds_of(setting: Setting, arguments: argparse.Namespace) -> tuple[list[Round], dict[str, Any]]:
    """Return every mode once a round, so that what else the machine does falls on all of them; and the deaths' seconds."""
    modes: dict[str, Colocation | None] = {"overallocated": None}
    if arguments.profile:
        modes["adaptive"] = read_colocation(arguments.profile)
    baseline = Baseline(setting)
    rounds: list[Round] = [{} for _ in range(arguments.rounds)]
    deaths: dict[str, Any] = {}
    for name, shared in modes.items():
        async with Supervisor(executor.settings_of(setting, shared, arguments.itl_slo_seconds)) as running:
            await executor.warm_up(running, setting)
            for results in rounds:
                results[name] = await executor.run(running, setting)
                for chunk in setting.chunks if name == "overallocated" else ():
                    results[f"lockstep_{chunk}"] = await asyncio.to_thread(baseline.run, chunk)
            if name == "overallocated":
                for side in SIDES:
                    deaths[side] = spread([await executor.seconds_after_death(running, side) for _ in range(5)])
    return rounds, deaths


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def lines(setting: Setting, rounds: list[Round], peak: float, slo_seconds: float) -> list[dict[str, Any]]:
    """Return each figure beside its target. On a CPU they only show that the comparison runs."""
    chunks = [f"lockstep_{chunk}" for chunk in setting.chunks]
    own = [name for name in ("overallocated", "adaptive") if name in rounds[0]]
    ratios = [
        max(item[name]["requests_per_second"] for name in own) / max(item[n]["requests_per_second"] for n in chunks)
        for item in rounds
    ]
    flops = [item[own[-1]]["long_prefill"]["prefill_flops_per_second"] / peak for item in rounds]
    itl = {name: spread([item[name]["long_prefill"]["itl_p99_seconds"] for item in rounds]) for name in (*own, *chunks)}
    return [
        {"what": "throughput over the best chunk", "figure": spread(ratios), "bar": 1.3},
        {
            "what": f"ITL p99 at a batch of {setting.workload.concurrency} during one prompt of "
            f"{setting.long_prompt_tokens} tokens",
            "figure": itl,
            "bar": f"ours under an SLO that every chunk breaks ({slo_seconds} s was asked for)",
        },
        {"what": "prefill's share of the matrix peak", "figure": spread(flops), "bar": 0.4},
    ]


def decision_seconds() -> float:
    """Return one decision of the adaptive resource manager, over a table of eight batches and eight shares."""
    shares = tuple(i / 9 for i in range(1, 9))
    table = ShareTable(shares, tuple(2**i for i in range(8)), ((0.05,) * 8,) * 8, (0.06,) * 8)
    load, policy = StepLoad(40, True), SharingPolicy(0.04)
    return min(timeit.repeat(lambda: next_sharing(PartitionState(), load, table, policy=policy), number=1000)) / 1000


def matrix_peak(setting: Setting) -> float:
    """Floating-point operations per second of one large product on random data, the best of four times five."""
    size = setting.matrix_size
    a, b = (torch.randn(size, size) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(5):
            product = a @ b
        product[0, 0].item()
        best = min(best, (time.perf_counter() - started) / 5)
    return 2.0 * size**3 / best


def _device_name() -> str:
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="a measured profile: adds the executor with adaptive shares")
    parser.add_argument("--itl-slo-seconds", type=float, default=0.03)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    setting = CPU
    peak = matrix_peak(setting)
    rounds, deaths = asyncio.run(rounds_of(setting, arguments))
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": _device_name(),
        "torch": torch.__version__,
        "setting": asdict(setting),
        "lines": lines(setting, rounds, peak, arguments.itl_slo_seconds),
        "seconds_after_death": deaths,
        "decision_seconds": decision_seconds(),
        "matrix_peak_flops_per_second": peak,
        "rounds": rounds,
    }
    text = json.dumps(results, indent=1)
    print(text)
    arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

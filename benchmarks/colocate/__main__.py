"""A colocated instance against vLLM's chunked prefill and against 1P-1D with our hand-over, one system after the other.

All get the same traffic, model and cores. Each prints a line of JSON; the last line compares them.

    make bench AREA=colocate
    python -m benchmarks.colocate --model models/smollm2 --profile smollm2.yaml --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from benchmarks.colocate.systems import Chunked, Colocated, Disaggregated, Endpoint, System
from benchmarks.colocate.traffic import Client, LongPrompt
from tools.processes import Children
from tools.real_model import make_real_model
from tools.stack import has_cuda

COLOCATED = "colocated"


@dataclass(frozen=True)
class Figures:
    """Figures of one system. `goodput` is requests per second within both objectives, by offered load."""

    system: str
    long_prompt: LongPrompt
    goodput: dict[float, float]


async def measure(system: System, endpoint: Endpoint, options: argparse.Namespace, num_tokens: int) -> Figures:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(endpoint, session, num_tokens=num_tokens, seed=options.seed)
        await client.ask(256, 16)
        long_prompt = await client.long_prompt(batch=4, num_tokens=options.long_tokens, repeats=options.repeats)
        goodput = {}
        for rate in options.rates:
            timings = await client.load(
                rate, seconds=options.seconds, mean_prompt=options.mean_prompt, max_tokens=options.max_tokens
            )
            met = sum(timing.meets(options.itl_slo, options.ttft_scale) for timing in timings)
            goodput[rate] = round(met / options.seconds, 3)
    return Figures(system.name, long_prompt, goodput)


def compare(figures: Sequence[Figures]) -> dict[str, object]:
    """Return the colocated instance over the best of the others, for each figure."""
    colocated = next(item for item in figures if item.system == COLOCATED)
    others = [item for item in figures if not item.system.startswith(COLOCATED)]
    chunked = min(
        (item for item in others if item.system.startswith("chunked")), key=lambda item: item.long_prompt.itl_p99
    )
    best = {rate: max(item.goodput[rate] for item in others) for rate in colocated.goodput}
    return {
        "best_chunked": chunked.system,
        "itl_p99_ratio": round(colocated.long_prompt.itl_p99 / chunked.long_prompt.itl_p99, 3),
        "ttft_ratio": round(colocated.long_prompt.ttft / chunked.long_prompt.ttft, 3),
        "goodput_ratio": {rate: round(colocated.goodput[rate] / best[rate], 3) for rate in best if best[rate]},
    }


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocate", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 if left out")
    parser.add_argument("--profile", type=Path, help="colocation profile, from prfaas-colocate profile")
    parser.add_argument("--chunks", type=numbers, default=[128, 256, 512, 1024], help="chunk sizes of the baseline")
    parser.add_argument("--threads", type=numbers, default=[1, os.cpu_count()], help="OpenMP threads of the baseline")
    parser.add_argument("--shares", type=numbers, default=[0.5], help="pinned partitions as further baselines")
    parser.add_argument("--rates", type=numbers, default=[0.25, 0.5, 1.0, 2.0], help="offered requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each load")
    parser.add_argument("--repeats", type=int, default=5, help="long prompts")
    parser.add_argument("--long-tokens", type=int, default=2048)
    parser.add_argument("--mean-prompt", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--itl-slo", type=float, default=0.1, help="seconds, p95 of a request")
    parser.add_argument("--ttft-scale", type=float, default=1.0, help="seconds for each started 1,000 prompt tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flags", default="--max-model-len 4096 --max-num-seqs 16", help="flags of vLLM")
    return parser.parse_args()


def _systems(options: argparse.Namespace) -> list[System]:
    systems: list[System] = [Colocated(COLOCATED, 2048, profile=options.profile)]
    systems += [Colocated(f"{COLOCATED}, pinned {share:g}", 2048, decode_share=share) for share in options.shares]
    systems += [Disaggregated("1P-1D", 2048)]
    for chunk in options.chunks:
        for threads in options.threads:
            systems.append(Chunked(f"chunked {chunk:g}, {threads:g} threads", int(chunk), int(threads)))
    return systems


def main() -> int:
    options = _options()
    if has_cuda():
        sys.stderr.write("This machine has a GPU. Colocated instances run on CPUs only, so CPUs are measured.\n")
    flags = (*options.flags.split(), "--kv-cache-memory-bytes", str(1 << 29))
    measured: list[Figures] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or make_real_model(Path(temporary) / "smollm2")
        num_tokens = json.loads((model / "config.json").read_text())["vocab_size"]
        for number, system in enumerate(_systems(options)):
            directory = Path(temporary) / str(number)
            directory.mkdir()
            with Children(directory) as children:
                endpoint = system.start(children, directory, model, flags)
                measured.append(asyncio.run(measure(system, endpoint, options, num_tokens)))
            sys.stdout.write(json.dumps(asdict(measured[-1])) + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(compare(measured)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A colocated instance against vLLM's chunked prefill: the same traffic, model and cores, one system after the other.

make bench AREA=colocate ARGS='--model models/smollm2 --seconds 60'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import aiohttp

from benchmarks.colocate.traffic import Client, LongPrompt
from tools.demo.client import is_answering
from tools.processes import Children
from tools.real_model import make_real_model
from tools.stack import EngineProcess, Stack

START_SECONDS = 600.0


@dataclass(frozen=True)
class System:
    """One of the systems: a colocated instance, or vLLM with a chunk size."""

    name: str
    chunk_tokens: int
    is_colocated: bool = False
    decode_share: float = 0.0

    def start(self, stack: Stack, model: Path, flags: tuple[str, ...]) -> EngineProcess:
        extra = (*flags, "--served-model-name", "model", "--no-enable-prefix-caching")
        extra = (*extra, "--max-num-batched-tokens", str(self.chunk_tokens))
        if self.is_colocated:
            return stack.start_colocate(model, extra=extra, decode_share=self.decode_share)
        return stack.start_engine(self.name, model, agent=None, role="", extra=extra)


@dataclass(frozen=True)
class Figures:
    """Figures of one system. `goodput` is requests per second within both objectives, by offered load."""

    system: str
    long_prompt: LongPrompt
    goodput: dict[float, float]


async def measure(system: System, engine: EngineProcess, options: argparse.Namespace, num_tokens: int) -> Figures:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(engine.url, session, num_tokens=num_tokens, seed=options.seed)
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


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocate", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 if left out")
    parser.add_argument("--chunks", type=numbers, default=[128, 256, 512, 1024], help="chunk sizes of the baseline")
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


def main() -> int:
    options = _options()
    systems = [System("colocated", 2048, is_colocated=True)]
    systems += [System(f"colocated, pinned {share:g}", 2048, True, share) for share in options.shares]
    systems += [System(f"chunked {int(chunk)}", int(chunk)) for chunk in options.chunks]
    flags = (*options.flags.split(), "--kv-cache-memory-bytes", str(1 << 29))
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or make_real_model(Path(temporary) / "smollm2")
        num_tokens = json.loads((model / "config.json").read_text())["vocab_size"]
        for system in systems:
            directory = Path(temporary) / system.name.replace(" ", "-")
            directory.mkdir()
            with Children(directory) as children:
                engine = system.start(Stack(children, directory), model, flags)
                children.wait_until(engine.child, partial(is_answering, f"{engine.url}/health"), seconds=START_SECONDS)
                figures = asyncio.run(measure(system, engine, options, num_tokens))
            sys.stdout.write(json.dumps(asdict(figures)) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

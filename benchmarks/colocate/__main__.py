"""A colocated instance against vLLM's chunked prefill and against 1P-1D with our hand-over, on the same cores.

All systems run at once, and get the same traffic in turn, so that each round compares them under equal conditions. Each point
is written to `--results` when it is measured. A run that was ended goes on where it stopped.

    make bench AREA=colocate
    python -m benchmarks.colocate --model models/smollm2 --profile smollm2.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.colocate.systems import Chunked, Colocated, Disaggregated, Endpoint, System
from benchmarks.colocate.tables import COLOCATED, tables
from benchmarks.colocate.traffic import Client, Load
from tools.processes import Children
from tools.real_model import make_real_model
from tools.stack import has_cuda

RESULTS = Path(__file__).resolve().parent.parent / "results/colocate.json"
Key = tuple[str, float, int]  # System, offered load (0: the long prompt), round.


class Results:
    """Points of one model in a file that holds all models."""

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._all: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
        self.points = self._all.setdefault(model, [])

    def has(self, key: Key) -> bool:
        return any((point["system"], point["rate"], point["round"]) == key for point in self.points)

    def add(self, key: Key, figures: Any) -> None:
        """Write a point, whole or not at all."""
        self.points.append(dict(zip(("system", "rate", "round"), key, strict=True)) | {"figures": figures})
        partial = self._path.with_suffix(".partial")
        lines = (
            f' "{model}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in self._all[model]) + "\n ]"
            for model in self._all
        )
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(self._path)


async def measure(endpoint: Endpoint, key: Key, options: argparse.Namespace, num_tokens: int) -> Any:
    """Return the figures of one point."""
    _, rate, number = key
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as session:
        # Agents keep KV, so no two points may have equal prompts.
        client = Client(endpoint, session, num_tokens=num_tokens, seed=1000 * number + round(100 * rate))
        if rate:
            load = Load(rate, options.seconds, options.mean_prompt, options.max_tokens)
            return await client.load(load, seed=number)
        return await client.long_prompt(batch=4, num_tokens=options.long_tokens)


async def warm_up(endpoint: Endpoint, options: argparse.Namespace, num_tokens: int) -> None:
    """Send prompts of all lengths, since an engine's first steps of each shape are slow."""
    async with aiohttp.ClientSession() as session:
        client = Client(endpoint, session, num_tokens=num_tokens, seed=0)
        for length in (16, 128, 512, options.long_tokens):
            await client.ask(length, 8)
        await asyncio.gather(*(client.ask(32, 8) for _ in range(8)))


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocate", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 if left out")
    parser.add_argument("--profile", type=Path, help="colocation profile, from prfaas-colocate profile")
    parser.add_argument("--chunks", type=numbers, default=[64, 128, 256, 512], help="chunk sizes of the baseline")
    parser.add_argument("--threads", type=numbers, default=[os.cpu_count()], help="OpenMP threads of the baseline")
    parser.add_argument("--shares", type=numbers, default=[0.5], help="pinned partitions as further baselines")
    parser.add_argument("--systems", default=".", help="regular expression of the systems to measure")
    parser.add_argument(
        "--rates", type=numbers, default=[0.0, 0.5, 0.75, 1.0], help="requests per second; 0: the long prompt"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=16.0, help="length of each load")
    parser.add_argument("--long-tokens", type=int, default=2048)
    parser.add_argument("--mean-prompt", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--itl-targets", type=numbers, default=[0.05, 0.1, 0.2], help="itl_slo_seconds, one instance each"
    )
    parser.add_argument(
        "--flags", default="--enforce-eager --max-model-len 4096 --max-num-seqs 16", help="flags of vLLM"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _systems(options: argparse.Namespace) -> list[System]:
    systems: list[System] = [
        Colocated(f"{COLOCATED}, {target * 1000:g} ms", 512, profile=options.profile, itl_slo_seconds=target)
        for target in options.itl_targets
    ]
    systems += [Colocated(f"pinned {share:g}", 512, decode_share=share) for share in options.shares]
    systems += [Disaggregated("1P-1D", 2048)]
    for chunk in options.chunks:
        for threads in options.threads:
            systems.append(Chunked(f"chunked {chunk:g}, {threads:g} threads", int(chunk), int(threads)))
    return [system for system in systems if re.search(options.systems, system.name)]


def _keys(options: argparse.Namespace, systems: list[System], results: Results) -> list[Key]:
    """Return the points to measure, round by round."""
    numbers, names = range(options.rounds), [system.name for system in systems]
    keys = [(name, rate, number) for number in numbers for rate in options.rates for name in names]
    return [key for key in keys if not results.has(key)]


def main() -> int:
    options = _options()
    if has_cuda():
        sys.stderr.write("This machine has a GPU. Colocated instances run on CPUs only, so CPUs are measured.\n")
    flags = (*options.flags.split(), "--kv-cache-memory-bytes", str(1 << 29))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        model = options.model or make_real_model(Path(temporary) / "smollm2")
        num_tokens = json.loads((model / "config.json").read_text())["vocab_size"]
        results = Results(options.results, model.name)
        systems = _systems(options)
        keys = _keys(options, systems, results)
        started: dict[str, tuple[Children, Endpoint]] = {}
        for number, system in enumerate(systems):
            if any(key[0] == system.name for key in keys):
                directory = Path(temporary) / str(number)
                directory.mkdir()
                children = stack.enter_context(Children(directory))
                started[system.name] = children, system.start(children, directory, model, flags)
        for children, endpoint in started.values():
            endpoint.wait(children)
            asyncio.run(warm_up(endpoint, options, num_tokens))
        for key in keys:
            figures = asyncio.run(measure(started[key[0]][1], key, options, num_tokens))
            results.add(key, figures)
            sys.stderr.write(f"{key}: {figures if key[1] == 0 else len(figures)}\n")
        sys.stdout.write(tables(results.points))
    return 0


if __name__ == "__main__":
    sys.exit(main())

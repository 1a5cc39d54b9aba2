"""A colocated instance in a PrfaaS deployment: requests per second as the planner promises them, and as served.

Agents carry the KV of long prompts from an engine in another cluster. It has computed them before the clock starts, and
computes one token of each again, so that it takes hardly any cores from the instance. The instance prefills short
prompts, and always has requests waiting. A profile that does not exist yet is measured first.

    python -m benchmarks.colocate.planned --profile smollm2.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import psutil

from benchmarks.colocate.systems import MODEL, Endpoint
from benchmarks.colocate.traffic import Client
from benchmarks.connector.sites import grant_key, grant_of
from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.lengths import Lengths
from prfaas.model.cost.workload import OutputTokens, Workload, with_context
from prfaas.model.deployment import Deployment, Objectives, PdCluster, PrfaasCluster
from prfaas.model.planning.single_pd import SinglePd
from prfaas.solve.files import catalog
from prfaas.solve.files.profile_file import read_profile
from tools.processes import Children
from tools.real_model import make_real_model
from tools.stack import EAGER_ENVIRONMENT, ENGINE_ENVIRONMENT, Stack, script

ENGINE_FLAGS = (
    *("--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(1 << 30)),
    *("--max-num-batched-tokens", "512"),
)
SERVED_FLAGS = ("--served-model-name", MODEL, "--no-enable-prefix-caching")
BATCH = 16  # The largest batch of a profile.
REMOTE_TOKENS = 8 * 128 + 2  # The prefill leg lacks the last token, and computes the one after eight whole blocks.


@dataclass(frozen=True)
class Request:
    """Request whose KV comes from the other cluster if it `is_remote`."""

    prompt_tokens: int
    output_tokens: int
    is_remote: bool


@dataclass(frozen=True)
class Mix:
    """Short prompts, and a share of long ones that come from the other cluster."""

    name: str
    local_tokens: int
    remote_tokens: int
    remote_ratio: float
    output_tokens: int

    def requests(self, number: int) -> list[Request]:
        """Return requests with answers of half to 1.5 times the mean."""
        requests = []
        for index in range(number):
            is_remote = int((index + 1) * self.remote_ratio) > int(index * self.remote_ratio)
            output_tokens = max(2, round(self.output_tokens * (0.5 + index * 0.618 % 1.0)))
            requests.append(Request(self.remote_tokens if is_remote else self.local_tokens, output_tokens, is_remote))
        return requests


MIXES = (
    Mix("much prefill", 768, REMOTE_TOKENS, 0.25, 24),
    Mix("both", 512, REMOTE_TOKENS, 0.5, 64),
    Mix("much decode", 256, REMOTE_TOKENS, 0.75, 160),
)


@dataclass(frozen=True)
class Site:
    """The colocated instance, and the engine of the other cluster with its agent as `others`."""

    local: Endpoint
    remote: Endpoint
    others: tuple[int, ...]

    async def served(self, requests: list[Request], waiting: int, *, num_tokens: int, seed: int) -> tuple[float, float]:
        """Return the requests per second that the instance ends while `waiting` others are under way.

        Return also the share of the machine that the other cluster and the clients took meanwhile.
        """
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            # Clients of one seed draw the same prompts.
            client = partial(Client, session=session, num_tokens=num_tokens)
            remote, local = client(self.remote, seed=seed), client(self.local, seed=-seed)
            assert self.remote.prefill is not None
            prefill_only = client(Endpoint(self.remote.prefill), seed=seed)
            for request in requests:
                if request.is_remote:
                    await prefill_only.ask(request.prompt_tokens, 1)
            ends: list[tuple[float, float]] = []  # Time, and processor seconds of the other programs.
            places = asyncio.Semaphore(waiting)

            async def ask(request: Request) -> None:
                await (remote if request.is_remote else local).ask(request.prompt_tokens, request.output_tokens)
                ends.append((time.monotonic(), self._other_seconds()))
                places.release()

            tasks = []
            for request in requests:
                await places.acquire()
                tasks.append(asyncio.ensure_future(ask(request)))
            await asyncio.gather(*tasks)
        # From the end of the first fifth until the last request was sent.
        last = len(requests) - waiting
        seconds, other_seconds = (end - start for end, start in zip(ends[last - 1], ends[last // 5], strict=True))
        return (last - 1 - last // 5) / seconds, other_seconds / seconds / (os.cpu_count() or 1)

    def _other_seconds(self) -> float:
        processes = [psutil.Process(pid) for pid in self.others]
        tree = [*processes, *(child for process in processes for child in process.children(recursive=True))]
        return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in tree)


def planned(mix: Mix, requests: list[Request], model: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the planner's requests per second, and the instance's fractional roles."""
    profile = read_profile(options.profile)
    if profile.sharing is None:
        raise ConfigError(f"{options.profile}: no steps of decode alone, or no colocation")
    deployment = Deployment(
        "colocated",
        catalog.find_model(str(model / "config.json")),
        (PrfaasCluster("east", profile, 1 << 20),),
        (PdCluster("west", profile, 1, shared_instances=1, frontier=profile.sharing.frontier),),
        objectives=Objectives(1.0 / options.itl),
    )
    lengths = Lengths([request.prompt_tokens for request in requests])
    output = OutputTokens(statistics.mean(request.output_tokens for request in requests))
    loads = LoadModel(deployment, Workload("mix", lengths, with_context(output, lengths)))
    solver, (roles,) = SinglePd(loads), loads.roles
    prefill = max(
        (roles.most_prefill * part / 1000 for part in range(1001)),
        key=lambda count: solver.sustained(mix.local_tokens, count),
    )
    return solver.sustained(mix.local_tokens, prefill), prefill, roles.num_decode(prefill)


@contextmanager
def running_site(directory: Path, model: Path, options: argparse.Namespace) -> Iterator[Site]:
    """Start agents, the instance and the other cluster's engine. They end with the context."""
    flags = (*ENGINE_FLAGS, *SERVED_FLAGS, "--max-num-seqs", str(BATCH))
    with Children(directory) as children:
        stack = Stack(children, directory)
        agents = {name: stack.start_agent(name, pool_bytes="6GiB") for name in ("west", "east")}
        for agent in agents.values():
            stack.await_agent(agent)
        west = stack.start_colocate(
            model,
            extra=flags,
            profile=str(options.profile.resolve()),
            itl_slo_seconds=f"{options.itl}s",
            agent_socket=str(agents["west"].socket),
        )
        cores = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"}
        east = stack.start_engine("east", model, agent=agents["east"], role="kv_both", extra=flags, environment=cores)
        grant = partial(
            grant_of, MODEL, source=agents["east"], destination=agents["west"], key=grant_key(stack), seconds=600.0
        )
        others = (east.child.process.pid, agents["east"].child.process.pid)
        site = Site(Endpoint(west), Endpoint(west, east, grant), others)
        site.remote.wait(children)
        yield site


def _measure_profile(model: Path, profile: Path) -> None:
    command = [script("prfaas-colocate"), "profile", "--model", str(model), "--profile", str(profile), "--"]
    command += [*ENGINE_FLAGS, "--max-num-seqs", str(BATCH + 1)]
    subprocess.run(command, check=True, env=os.environ | ENGINE_ENVIRONMENT | EAGER_ENVIRONMENT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocate.planned", description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 if left out")
    parser.add_argument("--profile", type=Path, required=True, help="colocation profile; measured if it does not exist")
    parser.add_argument("--itl", type=float, default=0.1, help="objective of a decode step in seconds")
    parser.add_argument("--requests", type=int, default=90, help="requests of each mix")
    parser.add_argument("--waiting", type=int, default=24, help="requests under way at once")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or make_real_model(Path(temporary) / "smollm2")
        if not options.profile.exists():
            _measure_profile(model, options.profile)
        num_tokens = json.loads((model / "config.json").read_text())["vocab_size"]
        sys.stdout.write(
            "| mix | a, b | planned (req/s) | served (req/s) | served / planned | others' share | without it |\n"
            "|---|---|---|---|---|---|---|\n"
        )
        with running_site(Path(temporary), model, options) as site:
            # Agents keep KV, so no two rounds may have equal prompts.
            for seed, mix in enumerate(MIXES * options.rounds, start=1):
                requests = mix.requests(options.requests)
                promised, *roles = planned(mix, requests, model, options)
                rate, others = asyncio.run(site.served(requests, options.waiting, num_tokens=num_tokens, seed=seed))
                cells = [mix.name, ", ".join(f"{role:.2f}" for role in roles), f"{promised:.2f}", f"{rate:.2f}"]
                cells += [f"{ratio:.0%}" for ratio in (rate / promised, others, rate / promised / (1 - others))]
                sys.stdout.write(f"| {' | '.join(cells)} |\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Systems under comparison, each on all cores of this machine: colocated, chunked prefill, and 1P-1D."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.connector.sites import grant_key, grant_of, parameters
from tools.demo.client import is_answering
from tools.processes import Children
from tools.stack import EngineProcess, Stack

MODEL = "model"
START_SECONDS = 600.0


@dataclass(frozen=True)
class Endpoint:
    """Server of a system. In 1P-1D a request has a second leg to `prefill_url`, and each leg has parameters of its own."""

    decode: EngineProcess
    prefill: EngineProcess | None = None
    grant: Callable[[Sequence[int]], str] | None = None

    @property
    def url(self) -> str:
        return self.decode.url

    @property
    def prefill_url(self) -> str:
        return self.prefill.url if self.prefill else ""

    def wait(self, children: Children) -> None:
        """Wait until all engines serve."""
        for engine in filter(None, (self.decode, self.prefill)):
            is_ready = partial(is_answering, f"{engine.url}/health")
            children.wait_until(engine.child, is_ready, seconds=START_SECONDS)

    def legs(self, prompt: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parameters of the decode leg and of the prefill leg."""
        if self.grant is None:
            return {}, {}
        grant = self.grant(prompt)
        decode, prefill = parameters("do_remote_prefill", grant), parameters("do_remote_decode", grant)
        return {"kv_transfer_params": decode}, {"kv_transfer_params": prefill}


@dataclass(frozen=True)
class System:
    """One of the systems, with its settings."""

    name: str
    chunk_tokens: int

    def start(self, children: Children, directory: Path, model: Path, flags: tuple[str, ...]) -> Endpoint:
        """Start the system's processes."""
        raise NotImplementedError

    def _flags(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        own = ("--served-model-name", MODEL, "--no-enable-prefix-caching")
        return (*flags, *own, "--max-num-batched-tokens", str(self.chunk_tokens))


@dataclass(frozen=True)
class Colocated(System):
    """A colocated instance. `decode_share` above 0 pins the partition, and `profile` feeds the manager."""

    decode_share: float = 0.0
    profile: Path | None = None
    itl_slo_seconds: float = 0.05

    def start(self, children: Children, directory: Path, model: Path, flags: tuple[str, ...]) -> Endpoint:
        settings: dict[str, Any] = {}
        if self.profile:
            settings = {"profile": str(self.profile), "itl_slo_seconds": f"{self.itl_slo_seconds}s"}
        engine = Stack(children, directory).start_colocate(
            model, extra=self._flags(flags), decode_share=self.decode_share, **settings
        )
        return Endpoint(engine)


@dataclass(frozen=True)
class Chunked(System):
    """vLLM with chunked prefill."""

    threads: int = 1

    def start(self, children: Children, directory: Path, model: Path, flags: tuple[str, ...]) -> Endpoint:
        engine = Stack(children, directory).start_engine(
            MODEL, model, agent=None, role="", extra=self._flags(flags), environment=_threads(self.threads)
        )
        return Endpoint(engine)


@dataclass(frozen=True)
class Disaggregated(System):
    """1P-1D: two instances of vLLM on half of the cores each. Agents hand the KV over, and run beside prefill."""

    def start(self, children: Children, directory: Path, model: Path, flags: tuple[str, ...]) -> Endpoint:
        stack = Stack(children, directory)
        cores = sorted(os.sched_getaffinity(0))
        halves = {"decode": cores[: len(cores) // 2], "prefill": cores[len(cores) // 2 :]}
        roles = {"decode": "kv_both", "prefill": "kv_producer"}
        agents, engines = {}, {}
        for name, half in halves.items():
            with _on_cores(half):
                agents[name] = stack.start_agent(name)
                children.wait_until(agents[name].child, agents[name].socket.exists, seconds=START_SECONDS)
                engines[name] = stack.start_engine(
                    name,
                    model,
                    agent=agents[name],
                    role=roles[name],
                    extra=self._flags(flags),
                    environment=_threads(len(half)),
                )
        grant = partial(grant_of, MODEL, source=agents["prefill"], destination=agents["decode"], key=grant_key(stack))
        return Endpoint(engines["decode"], engines["prefill"], grant)


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Start processes on these cores: children inherit them."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number)}

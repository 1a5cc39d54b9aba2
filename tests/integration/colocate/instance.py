"""A running colocated instance: requests, its workers, and their deaths."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tools.demo.client import complete, get_text, is_answering
from tools.processes import Child, Children
from tools.stack import START_SECONDS, EngineProcess, Stack
from tools.tiny_models import VOCABULARY

FLAGS = ("--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")
KV_BYTES = 1 << 27


@dataclass(frozen=True)
class Prompt:
    """A prompt and the length of its answer."""

    token_ids: list[int]
    max_tokens: int


def mixed_prompts(number: int, *, seed: int, longest: int = 1500) -> list[Prompt]:
    """Return prompts of all lengths, some with equal beginnings, so that prefix caching has work."""
    random = Random(seed)
    beginnings = [[random.choice(VOCABULARY) for _ in range(longest)] for _ in range(4)]
    prompts = []
    for _ in range(number):
        length = int(2 ** random.uniform(2, longest.bit_length() - 0.5))
        shared = random.randrange(length) if random.random() < 0.5 else 0
        own = [random.choice(VOCABULARY) for _ in range(length - shared)]
        prompts.append(Prompt(random.choice(beginnings)[:shared] + own, random.randrange(1, 32)))
    return prompts


class Instance:
    """A colocated instance of a model, or a plain engine of it, with the same flags of vLLM."""

    def __init__(
        self,
        children: Children,
        directory: Path,
        model: Path,
        *,
        is_plain: bool = False,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._children = children
        self.model = model
        stack = Stack(children, directory)
        extra = (*FLAGS, "--kv-cache-memory-bytes", str(KV_BYTES), *flags)
        self.engine: EngineProcess = (
            stack.start_engine("plain", model, agent=None, role="", extra=extra, environment=environment)
            if is_plain
            else stack.start_colocate(model, extra=extra, environment=environment)
        )
        self.wait()

    @property
    def child(self) -> Child:
        return self.engine.child

    def wait(self) -> None:
        """Wait until the instance serves."""
        self._children.wait_until(
            self.child, lambda: is_answering(f"{self.engine.url}/health"), seconds=2 * START_SECONDS
        )

    def stop(self) -> None:
        """Stop the instance before its fixture does."""
        self._children.stop_child(self.child)

    def ask(self, prompt: Prompt, **fields: Any) -> tuple[int, ...]:
        """Return the greedy answer to a prompt."""
        body = {"model": self.model.name, "prompt": prompt.token_ids, "max_tokens": prompt.max_tokens}
        return complete(self.engine.url, body | {"temperature": 0, "ignore_eos": True} | fields).token_ids

    def ask_all(self, prompts: list[Prompt], *, at_once: int = 6) -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self.ask, prompts))

    def metric(self, name: str) -> float:
        """Return the sum of one of vLLM's metrics."""
        lines = [line for line in get_text(f"{self.engine.url}/metrics").splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def resident_bytes(self) -> int:
        """Return the memory of all processes. Pages that several share count once."""
        own = self.child.process.pid
        return sum(_proportional_bytes(process) for process in (own, *_descendants(own)))

    def worker(self, phase: str) -> int:
        """Return the process id of the worker of a phase, 0 if it has none at present."""
        found = [process for process in _descendants(self.child.process.pid) if _name(process) == f"prfaas-{phase}"]
        return found[0] if found else 0

    def kill(self, phase: str, sent: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the worker of a phase, if it has one at present; return what `worker` did."""
        worker = self.worker(phase)
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, sent)
        return worker


def _proportional_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _descendants(process: int) -> Iterator[int]:
    """Yield the processes below a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [process]
    while waiting:
        found = children.get(waiting.pop(), [])
        waiting += found
        yield from found

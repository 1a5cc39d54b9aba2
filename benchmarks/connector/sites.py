"""Real engines at the two ends of an emulated long link: requests through both, or through one alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.connector.nixl_peer import Mode, NixlEngines, NixlFailed, start_nixl
from prfaas import grants
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.types import AgentName, TransferId
from tools.demo.client import complete, prompt_tokens
from tools.processes import Child, Children
from tools.stack import START_SECONDS, AgentProcess, EngineProcess, Stack, engine_flags
from tools.tiny_models import VOCABULARY, make_model
from tools.wan import FAR, NEAR, Wan

FAMILY = "granite4h"
PROMPT_TOKENS = 24577
CHUNK_TOKENS = 256
STORED_SECONDS = 0.3  # Wait for a finished request's blocks; not counted.
WIRE_PORT = 7400
WHOLE = ("benchmarks.connector.store_and_forward", "StoreAndForwardConnector")
TIMED = ("benchmarks.connector.timed", "TimedConnector")


@dataclass
class Sites:
    """The decode engine near, two prefill engines far: one that pushes layers, one that stores and forwards; and NIXL's."""

    wan: Wan
    near: AgentProcess
    far: AgentProcess
    decode: EngineProcess
    prefill: EngineProcess
    store_and_forward: EngineProcess
    key: bytes
    nixl: dict[Mode, NixlEngines] = field(default_factory=dict)
    num_prompts: int = 0
    pushed: list[tuple[float, float]] = field(default_factory=list)  # Start and duration of the layer-wise run.

    def prompt(self) -> list[int]:
        """Return one that nobody has seen."""
        self.num_prompts += 1
        return prompt_tokens(PROMPT_TOKENS, seed=self.num_prompts, vocabulary=VOCABULARY)

    def local_seconds(self) -> float:
        """Return the decode engine alone."""
        return self._ask(self.decode, self.prompt(), cache_salt=os.urandom(8).hex())

    def pushed_seconds(self, engine: EngineProcess) -> float:
        asked = time.time()
        seconds = self._through_both(engine, self.prompt(), late_seconds=self.wan.shape.rtt_seconds / 2)
        if engine is self.prefill:
            self.pushed.append((asked, seconds))
        return seconds

    def pulled_seconds(self) -> float:
        prompt = self.prompt()
        computed = self._ask(self.prefill, prompt[:-1])
        time.sleep(STORED_SECONDS)
        return self.wan.shape.rtt_seconds / 2 + computed + self._through_both(self.prefill, prompt, late_seconds=0.0)

    def nixl_seconds(self, mode: Mode) -> float:
        """By NIXL.

        Raises:
            NixlFailed: it is not installed, or there was no token.
        """
        if mode not in self.nixl:
            raise NixlFailed("skipped: not installed")
        self.num_prompts += 1
        return self.nixl[mode].seconds(PROMPT_TOKENS, seed=self.num_prompts)

    def _through_both(self, engine: EngineProcess, prompt: Sequence[int], *, late_seconds: float) -> float:
        grant = self._grant(prompt)
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(
                self._ask, self.decode, prompt, kv_transfer_params=parameters("do_remote_prefill", grant)
            )
            time.sleep(late_seconds)
            pool.submit(self._ask, engine, prompt[:-1], kv_transfer_params=parameters("do_remote_decode", grant))
            return decoding.result()

    def _ask(self, engine: EngineProcess, prompt: Sequence[int], **extra: Any) -> float:
        body = {"model": FAMILY, "prompt": list(prompt), "temperature": 0, "max_tokens": 1, "ignore_eos": True}
        return complete(engine.url, body | extra).ttft_seconds

    def _grant(self, prompt: Sequence[int]) -> str:
        return grant_of(FAMILY, prompt, source=self.far, destination=self.near, key=self.key)


def grant_of(
    family: str,
    prompt: Sequence[int],
    *,
    source: AgentProcess,
    destination: AgentProcess,
    key: bytes,
    seconds: float = 60.0,
) -> str:
    """Return a grant for all of `prompt` but its last token, as it stands in `kv_transfer_params`."""
    grant = Grant(
        transfer_id=TransferId(os.urandom(16)),
        source=AgentName(source.name),
        destination=AgentName(destination.name),
        destination_address=destination.wire,
        prompt_hash=HashChain(root_hash(family), prompt[:-1]).at(len(prompt) - 1),
        num_tokens=len(prompt) - 1,
        max_bytes=1 << 28,
        tenant="",
        expires_at=time.time() + seconds,
    )
    return grants.to_text(grants.sign(grant, key))


def parameters(direction: str, grant: str) -> dict[str, Any]:
    """`kv_transfer_params` of one leg."""
    return {direction: True, "prfaas_grant": grant}


@contextmanager
def running_sites(directory: Path, wan: Wan, *, compares: bool = True) -> Iterator[Sites]:
    """Start agents and engines; they end with the context. What `compares` not has only those that push layer by layer."""
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        near, far = start_agents(children, stack, wan)
        flags = engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=PROMPT_TOKENS + 256)
        decode = stack.start_engine("decode", model, agent=near, role="kv_both", extra=flags)
        prefill = stack.start_engine(
            "prefill", model, agent=far, role="kv_producer", extra=flags, connector_class=TIMED
        )
        stored, nixl = prefill, dict[Mode, NixlEngines]()
        if compares:
            stored = stack.start_engine(
                "stored", model, agent=far, role="kv_producer", extra=flags, connector_class=WHOLE
            )
            nixl = start_nixl(children, wan, model, flags=flags)
        for engine in (decode, prefill, stored):
            stack.await_server(engine.child, engine.url)
        with ExitStack() as resources:
            resources.enter_context(separated([prefill.child, stored.child, *(item.far for item in nixl.values())]))
            for item in nixl.values():
                resources.enter_context(item.standing_still())
            yield Sites(wan, near, far, decode, prefill, stored, grant_key(stack), nixl)


@contextmanager
def separated(prefilling: Sequence[Child]) -> Iterator[None]:
    """The engines that prefill have the first processor, and everything else the others, as two machines would have it.

    This process and what it still runs has all of them again afterwards.
    """
    processors = sorted(os.sched_getaffinity(0))
    own = {child.process.pid for child in prefilling}
    if len(processors) > 1:
        _keep_on(os.getpid(), set(processors[1:]), apart=own)
        for pid in own:
            _keep_on(pid, set(processors[:1]), apart=set())
    try:
        yield
    finally:
        _keep_on(os.getpid(), set(processors), apart=set())


def _keep_on(pid: int, processors: set[int], *, apart: set[int]) -> None:
    """A process, its threads and its descendants, without those that stand apart."""
    if pid in apart:
        return
    for task in _tasks(pid):
        with suppress(ProcessLookupError, FileNotFoundError):  # The process may have ended.
            os.sched_setaffinity(int(task.name), processors)
            for child in (task / "children").read_text().split():
                _keep_on(int(child), processors, apart=apart)


def _tasks(pid: int) -> list[Path]:
    """Return a process's threads; none when it has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []


def start_agents(children: Children, stack: Stack, wan: Wan, **settings: Any) -> tuple[AgentProcess, AgentProcess]:
    """Return the agents at the near and at the far end, the far one with these settings."""
    near = stack.start_agent("near", inside=wan.inside("near"), listen=f"{NEAR}:{WIRE_PORT}")
    far = stack.start_agent("far", inside=wan.inside("far"), listen=f"{FAR}:{WIRE_PORT}", **settings)
    for agent in (near, far):
        children.wait_until(agent.child, agent.socket.exists, seconds=START_SECONDS)
    return near, far


def grant_key(stack: Stack) -> bytes:
    """Return the key of the deployment's grants."""
    return grants.derive_key(stack.secret_file.read_bytes(), "grant")


def logged(child: Child, event: str) -> list[dict[str, Any]]:
    """Return the lines of a process's log that say this, oldest first."""
    marked = (line for line in child.log.read_text().splitlines() if f'"{event}"' in line)
    return [json.loads(line[line.index("{") :]) for line in marked]

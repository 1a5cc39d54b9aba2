"""Two nodes with real agents, and engines that know the bytes of every block."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from tests.support.fake_engine import MODEL, FakeEngine, GroupShape, Memory, Running, memory_of
from tests.support.transfer_grants import make_grant
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.client import get_json
from tools.processes import Children
from tools.stack import AgentProcess, Stack

GRANT_SECONDS = 20.0
NUM_TOKENS = 300  # Of a transfer: no multiple of a block or chunk.


@dataclass
class Nodes:
    """Two nodes with engines. Their pools may hold blocks of other tests under other models."""

    east: AgentProcess
    west: AgentProcess
    key: bytes
    children: Children
    model: str = MODEL
    engines: list[FakeEngine] = field(default_factory=list)

    def start(self, agent: AgentProcess, shapes: Sequence[GroupShape], **settings: Any) -> FakeEngine:
        return self.attach(agent, memory_of(shapes, model=self.model), **settings)

    def attach(self, agent: AgentProcess, memory: Memory, **settings: Any) -> FakeEngine:
        """Start an engine with these blocks."""
        engine = FakeEngine(agent.socket, memory, **settings)
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """Stop the engines but not the nodes."""
        for engine in self.engines:
            engine.close()

    def pair(self, shapes: Sequence[GroupShape], **settings: Any) -> tuple[FakeEngine, FakeEngine]:
        return self.start(self.east, shapes, **settings), self.start(self.west, shapes, **settings)

    def grant(self, prompt: Sequence[int], **changes: Any) -> str:
        chain = HashChain(root_hash(self.model), prompt[:-1])
        fields = {"expires_at": time.time() + GRANT_SECONDS} | changes
        return grants.to_text(grants.sign(make_grant(self.east.name, self.west, chain, **fields), self.key))

    def transfer(
        self,
        prefiller: FakeEngine,
        decoder: FakeEngine,
        prompt: Sequence[int],
        *,
        chunk_tokens: int = 100,
        **grant: Any,
    ) -> Running:
        """Run a prefill leg to its end. Return the decode leg, which has not loaded its KV yet."""
        signed = self.grant(prompt, **grant)
        parked = receiving(decoder, prompt, signed)
        prefill_leg(prefiller, prompt, signed, chunk_tokens=chunk_tokens)
        return parked

    def last_sent(self) -> dict[str, Any]:
        """Return the last transfer that left the eastern node."""
        last: dict[str, Any] = get_json(f"{self.east.status_url}/transfers")[-1]
        return last

    def status(self, agent: AgentProcess) -> dict[str, Any]:
        status: dict[str, Any] = get_json(f"{agent.status_url}/status")
        return status

    def assert_nothing_is_left(self) -> None:
        for agent in (self.east, self.west):
            what = f"an idle {agent.name}"
            # Unclaimed transfers stay until their grants expire.
            wait_until(lambda agent=agent: self._is_idle(agent), seconds=GRANT_SECONDS + PATIENCE_SECONDS, what=what)  # type: ignore[misc]

    def are_idle(self) -> bool:
        return self._is_idle(self.east) and self._is_idle(self.west)

    def await_nothing_read(self) -> None:
        """Wait until no engine waits for blocks or reads them."""
        for agent in (self.east, self.west):
            wait_until(
                lambda agent=agent: not self.status(agent)["receiving"] + self.status(agent)["prefix_store"],  # type: ignore[misc]
                what="the end of what was read",
            )

    def _is_idle(self, agent: AgentProcess) -> bool:
        status = self.status(agent)
        slots = status["pool"]["transfer"] + status["pool"]["quarantined"]
        uses = sum(status[word] for word in ("sending", "receiving", "prefix_store", "pending_claims", "leases"))
        return bool(slots + uses == 0)

    def kill_agent(self, name: Literal["east", "west"]) -> None:
        """Kill an agent and start it again, empty, at the same addresses."""
        agent: AgentProcess = getattr(self, name)
        setattr(self, name, replace(agent, child=self.children.kill_and_restart(agent.child)))


def prompt_of(seed: int, length: int = NUM_TOKENS + 1) -> list[int]:
    return [seed, *range(length - 1)]


def sending(engine: FakeEngine, prompt: Sequence[int], grant: str) -> Running:
    return engine.submit(f"p{prompt[0]}", prompt[:-1], {"do_remote_decode": True, "prfaas_grant": grant})


def receiving(engine: FakeEngine, prompt: Sequence[int], grant: str) -> Running:
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    return engine.submit(f"d{prompt[0]}", prompt, parameters)


def prefill_leg(engine: FakeEngine, prompt: Sequence[int], grant: str, *, chunk_tokens: int = 100) -> None:
    """Run a prefill leg from its request to its end."""
    prefilling = sending(engine, prompt, grant)
    engine.await_answer(prefilling)
    engine.prefill(prefilling, chunk_tokens=chunk_tokens)
    engine.finish(prefilling)


def load_and_finish(engine: FakeEngine, running: Running, num_tokens: int = NUM_TOKENS) -> None:
    """Load so many tokens for a request, check its blocks, and end it."""
    assert engine.await_answer(running) == num_tokens
    assert engine.load(running, num_tokens)
    assert engine.wrong_blocks(running, num_tokens) == []
    engine.finish(running)


def leave_prefix(engine: FakeEngine, prompt: Sequence[int], request_id: str = "first") -> None:
    """Compute a prompt of which the pool holds nothing, and leave it there."""
    running = engine.submit(request_id, prompt, {})
    assert engine.await_answer(running) == 0
    engine.prefill(running, chunk_tokens=64)
    engine.finish(running, leaves=True)


def reuse_prefix(engine: FakeEngine, prompt: Sequence[int]) -> None:
    """Load what `leave_prefix` left for a longer prompt, and end this request."""
    again = engine.submit("again", prompt_of(prompt[0], len(prompt) + 59), {})
    load_and_finish(engine, again, len(prompt))


@contextmanager
def running_nodes(directory: Path, **settings: Any) -> Iterator[Nodes]:
    with Children(directory) as children:
        stack = Stack(children, directory)
        settings = {"silence_seconds": f"{PATIENCE_SECONDS:.0f}s"} | settings
        east, west = (stack.start_agent(name, **settings) for name in ("east", "west"))
        stack.await_agent(east)
        stack.await_agent(west)
        made = Nodes(east, west, grants.derive_key(stack.secret_file.read_bytes(), "grant"), children)
        yield made
        made.close()

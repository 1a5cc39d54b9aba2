"""Engine without a model, which calls both sides of the connector in vLLM's order.

The bytes of a block depend on its group, its layer, and all tokens up to its last computed one. So the engine notices
blocks copied too early, from the wrong place or prompt, or not at all.
"""

import hashlib
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prfaas.agent.engine.client import AgentClient
from prfaas.connector.block_map import NULL_BLOCK, BlockMap
from prfaas.connector.metadata import Direction, Outcome, ScheduledRequest, Step
from prfaas.connector.scheduler.scheduler import SchedulerSide
from prfaas.connector.scheduler.store import BlockPins
from prfaas.connector.settings import ConnectorSettings
from prfaas.connector.transfer_params import EngineRequest, tenant_of
from prfaas.connector.worker.copy_host import LayerBlocks
from prfaas.connector.worker.worker import WorkerSide
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice, piece_of
from prfaas.types import Shard

MODEL = "fake"
NUM_BLOCKS = 256
ANSWER_SECONDS = 60.0
# Tests ask for reuse and for impatience explicitly.
QUIET: dict[str, Any] = {"reuse": False, "silence_seconds": ANSWER_SECONDS}
_instances = itertools.count(1)


@dataclass(frozen=True)
class GroupShape:
    """A KV group of the fake model: `layer_bytes[i]` is what one block takes in layer i."""

    engine: KVGroup
    layer_bytes: tuple[int, ...]


DENSE = (GroupShape(KVGroup("full_attention", 32), (700, 1000)),)
WINDOWED = (
    GroupShape(KVGroup("sliding_window", 32, window_tokens=100), (640,)),
    GroupShape(KVGroup("sliding_window", 32, window_tokens=100), (640,)),
    GroupShape(KVGroup("full_attention", 32), (640,)),
)
RECURRENT = (
    GroupShape(KVGroup("linear_state", 1 << 20), (5001,)),
    GroupShape(KVGroup("full_attention", 64), (2048, 2048)),
)
CHECKPOINTED = (
    GroupShape(KVGroup("linear_state", 64, kept_states=True), (5001, 40)),
    GroupShape(KVGroup("full_attention", 64), (2048,)),
)
SHAPES = {"dense": DENSE, "windowed": WINDOWED, "recurrent": RECURRENT, "checkpointed": CHECKPOINTED}


@dataclass(frozen=True)
class Memory:
    """An engine's blocks: `layers` by name, and each group as the scheduler sees it."""

    layout: Layout
    layers: dict[str, LayerBlocks]
    groups: tuple[KVGroup, ...]


def memory_of(shapes: Sequence[GroupShape], *, model: str = MODEL) -> Memory:
    """Blocks of bytes without a meaning."""
    groups, layers = [], {}
    for g, shape in enumerate(shapes):
        slices, offset = [], 0
        for n, size in enumerate(shape.layer_bytes):
            name = f"layers.{g}.{n}"
            slices.append(LayerSlice(name, offset, size, "uint8", "byte"))
            pages = torch.zeros(NUM_BLOCKS, size, dtype=torch.uint8)
            layers[name] = LayerBlocks(g, n, slices[-1], pages)
            offset += size
        block_tokens = 16 if shape.engine.is_state else shape.engine.block_tokens
        groups.append(KVGroup(shape.engine.kind, block_tokens, tuple(slices), shape.engine.window_tokens))
    return Memory(Layout(model, "", Shard(), tuple(groups)), layers, tuple(shape.engine for shape in shapes))


@dataclass
class Running:
    """A request inside the engine."""

    request_id: str
    prompt: Sequence[int]
    tenant: str = ""
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)


class FakeEngine:
    """One engine of `num_replicas` ranks with equal KV, or of several ranks: that of `memory`, and `others`.

    Nothing runs by itself: tests call the steps.
    """

    def __init__(
        self,
        agent_socket: Path,
        memory: Memory,
        *,
        directions: Sequence[Direction] = ("send", "receive"),
        others: Sequence[Memory] = (),
        num_replicas: int = 1,
        is_layerwise: bool = True,
        **settings: Any,
    ) -> None:
        self.groups = memory.groups
        self._model = memory.layout.model
        self._instance = f"fake-{next(_instances)}"
        self._tenant = settings.get("tenant", "")
        self._free = list(range(1, NUM_BLOCKS))
        self._pinned: Counter[int] = Counter()
        self._dropped: set[int] = set()  # Pinned blocks that no request holds.
        self._kept: dict[str, Running] = {}  # Finished requests whose blocks the connector still uses.
        self._names = {(layer.group, layer.layer): name for name, layer in memory.layers.items()}
        replicas = [replace(memory, layers=_copy_of(memory.layers)) for _ in range(num_replicas - 1)]
        self._ranks = [memory, *replicas, *others]
        self._workers = []
        own = ConnectorSettings(agent_socket=agent_socket, **QUIET | settings)
        for number, rank in enumerate(self._ranks):
            replica = number % num_replicas
            client = AgentClient(
                str(agent_socket),
                instance=self._instance,
                role="worker",
                rank=rank.layout.shard.rank,
                layout=rank.layout,
                replica=replica,
                num_replicas=num_replicas,
            )
            self._workers.append(
                WorkerSide(
                    client,
                    rank.layers,
                    rank.layout,
                    is_writer=replica == 0,
                    is_layerwise=is_layerwise,
                    staging_bytes=own.staging_bytes,
                )
            )
        self.worker = self._workers[0]
        self.num_streamed_steps = 0  # Steps in which a layer is copied when it ends.
        self.client = AgentClient(str(agent_socket), instance=self._instance, role="scheduler")
        self.scheduler = SchedulerSide(
            self.client,
            BlockMap(memory.groups),
            own,
            directions=directions,
            pins=BlockPins(self._pinned.update, self._unpin),
            num_workers=len(self._ranks),
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self.scheduler.close()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def outcomes(self) -> dict[str, int]:
        """Return the number of transfers by outcome, such as {"send completed": 1}."""
        counts = self.scheduler.counts.items()
        return {key.removeprefix("transfers "): int(count) for key, count in counts if key.startswith("transfers ")}

    # A request's life

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        parameters: dict[str, Any],
        *,
        salt: str = "",
        excluded: Outcome | None = None,
    ) -> Running:
        self.scheduler.on_new_request(
            EngineRequest(request_id, len(prompt), parameters, self._chain_of(prompt), salt, excluded)
        )
        tenant = tenant_of(parameters, salt, default=self._tenant)
        return Running(request_id, prompt, tenant)

    def _chain_of(self, tokens: Sequence[int]) -> Callable[[str], HashChain]:
        return lambda tenant: HashChain(root_hash(self._model, tenant.encode()), tokens)

    def await_answer(self, running: Running, *, local_tokens: int = 0) -> int:
        """Poll as vLLM's scheduler does until the request may run; how many tokens can be loaded."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            answer = self.scheduler.num_external_tokens(running.request_id, local_tokens)
            if answer is not None:
                return answer
            self.step([])
        raise AssertionError("the agent has not answered")

    def prefill(self, running: Running, *, chunk_tokens: int) -> None:
        """Compute the whole prompt in chunks."""
        while running.computed < len(running.prompt):
            self.step([(running, min(chunk_tokens, len(running.prompt) - running.computed))])

    def allocate(self, running: Running, external_tokens: int) -> None:
        """Give the request blocks for what was offered."""
        self._extend(running, external_tokens)
        self.scheduler.on_allocated(running.request_id, external_tokens, lambda: running.tables)

    def load(self, running: Running, external_tokens: int) -> bool:
        """Allocate and load what was offered; whether it succeeded."""
        self.allocate(running, external_tokens)
        finished, failed = self.step([])
        assert finished == {running.request_id}
        running.computed = external_tokens
        return not failed

    def finish(self, running: Running, *, leaves: bool = False) -> None:
        """The request ends, and steps follow until its blocks are free."""
        self.end(running, leaves=leaves)
        deadline = time.monotonic() + ANSWER_SECONDS
        self.step([])
        while self._kept or self.scheduler.needs_steps:
            assert time.monotonic() < deadline, "the blocks of a finished request are kept for ever"
            self.step([])

    def end(self, running: Running, *, leaves: bool = False) -> None:
        """The request ends. Its blocks are free at once, or once what it `leaves` to the pool is copied."""
        chain = self._chain_of(running.prompt[: running.computed])(running.tenant)
        keeps_blocks, _ = self.scheduler.on_finished(
            running.request_id, lambda: chain if leaves else None, lambda: running.tables
        )
        self._kept[running.request_id] = running
        if not keeps_blocks:
            self._release(running.request_id)

    def _release(self, request_id: str) -> None:
        running = self._kept.pop(request_id)
        for table in running.tables:
            for block in table:
                self._drop(block)
        running.tables = []

    def _drop(self, block: int) -> None:
        """No request holds the block any more."""
        if self._pinned[block]:
            self._dropped.add(block)
        elif block != NULL_BLOCK:
            self._free.append(block)

    def _unpin(self, blocks: Sequence[int]) -> None:
        self._pinned.subtract(blocks)
        for block in self._dropped.intersection(blocks):
            if not self._pinned[block]:
                self._dropped.remove(block)
                self._free.append(block)

    def step(self, work: Sequence[tuple[Running, int]]) -> tuple[set[str], set[str]]:
        """One engine step: `work` are requests and the tokens they compute. Returns the loads that ended, and that failed."""
        for running, num_tokens in work:
            self._extend(running, running.computed + num_tokens)
        scheduled = [
            ScheduledRequest(
                running.request_id, running.computed + num_tokens, partial(_tables_of, running), running.computed
            )
            for running, num_tokens in work
        ]
        step = self.scheduler.plan_step(scheduled)
        self._run_model(step, work)
        loaded, *others = [worker.take_results() for worker in self._workers]
        assert all(results == loaded for results in others), "each rank copies at once"
        self.scheduler.on_saved(Counter(number for worker in self._workers for number in worker.take_saved_steps()))
        self.scheduler.on_loaded(loaded.loaded, failed=loaded.failed)
        self.scheduler.on_stored(loaded.stored)
        for request_id in loaded.stored:
            self._release(request_id)
        return set(loaded.loaded), set(loaded.failed)

    def _run_model(self, step: Step, work: Sequence[tuple[Running, int]]) -> None:
        for worker in self._workers:
            worker.begin_step(step)
        self.num_streamed_steps += self.worker.awaits_layers
        for g, n in self._names:
            for running, num_tokens in work:
                self._fill(running, running.computed, running.computed + num_tokens, only=(g, n))
            for worker in self._workers if not self.groups[g].is_state else ():
                worker.on_layer_end(self._names[g, n])
        for running, num_tokens in work:
            running.computed += num_tokens
        for worker in self._workers:
            worker.start_loads()
            worker.on_forward_end()

    # Blocks

    def _extend(self, running: Running, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens; those outside a window, and of older states, become null."""
        running.tables = running.tables or [[] for _ in self.groups]
        for engine, table in zip(self.groups, running.tables, strict=True):
            last = engine.state_entry(num_tokens) + 1 if engine.is_state else -(-num_tokens // engine.block_tokens)
            table += [self._free.pop() for _ in range(last - len(table))]
            keep = engine.state_entry(num_tokens) if engine.is_state else engine.first_block(running.computed)
            for position in range(min(keep, len(table) - 1)):
                self._drop(table[position])
                table[position] = NULL_BLOCK

    def _fill(self, running: Running, start: int, end: int, *, only: tuple[int, int] | None = None) -> None:
        """Write what computing tokens [start, end) leaves in the blocks."""
        for g, n in [only] if only else list(self._names):
            for position, num_tokens in changed_blocks(self.groups[g], start, end):
                block = running.tables[g][position]
                if block != NULL_BLOCK:
                    for rank in self._ranks:
                        pages = whole_pages(rank.layers[self._names[g, n]])
                        pages[block] = self._right(rank, running.prompt[:num_tokens], g, n)

    def _right(self, rank: Memory, tokens: Sequence[int], group: int, layer: int) -> torch.Tensor:
        """Return what a rank's block holds once these tokens are computed. Each rank has a state of its own."""
        place = (group, layer, rank.layout.shard.rank) if self.groups[group].is_state else (group, layer)
        return content(tokens, place, whole_pages(rank.layers[self._names[group, layer]]).shape[1])

    def wrong_blocks(self, running: Running, num_tokens: int) -> list[tuple[int, int, int]]:
        """(group, layer, position) of the blocks that a model which resumes after `num_tokens` reads and that are not right."""
        wrong = []
        for (g, n), name in self._names.items():
            for position, end in read_blocks(self.groups[g], num_tokens):
                block = running.tables[g][position]
                for rank in self._ranks:
                    right = self._right(rank, running.prompt[:end], g, n)
                    if not torch.equal(whole_pages(rank.layers[name])[block], right):
                        wrong.append((g, n, position))
        return wrong


def whole_pages(layer: LayerBlocks) -> torch.Tensor:
    """The blocks of a layer of which a rank stores all or a piece."""
    number, num_pieces = piece_of(layer.slice)
    pages, size = layer.pages, layer.slice.payload_bytes
    shape, offset = (len(pages), num_pieces * size), pages.storage_offset() - number * size
    return pages.as_strided(shape, pages.stride(), offset)


def changed_blocks(group: KVGroup, before: int, after: int) -> list[tuple[int, int]]:
    """Return (position, tokens up to the block's last one afterwards) of what computing tokens [before, after) writes."""
    if group.is_state:
        return [(group.state_entry(after), after)]
    positions = range(before // group.block_tokens, -(-after // group.block_tokens))
    return [(position, min(after, (position + 1) * group.block_tokens)) for position in positions]


def read_blocks(group: KVGroup, num_tokens: int) -> list[tuple[int, int]]:
    """Return (position, tokens up to the block's last one) of what the token after `num_tokens` reads."""
    if not num_tokens:
        return []
    if group.is_state:
        return [(group.state_entry(num_tokens), num_tokens)]
    first_token = group.first_block(num_tokens) * group.block_tokens
    if group.kind == "chunked_local":
        assert group.window_tokens
        first_token = num_tokens // group.window_tokens * group.window_tokens
    return changed_blocks(group, first_token, num_tokens)


def _copy_of(layers: dict[str, LayerBlocks]) -> dict[str, LayerBlocks]:
    return {name: replace(layer, pages=torch.zeros_like(layer.pages)) for name, layer in layers.items()}


def _tables_of(running: Running) -> Sequence[Sequence[int]]:
    return running.tables


def content(tokens: Sequence[int], place: tuple[int, ...], size: int) -> torch.Tensor:
    """The bytes that computing the last of these tokens leaves at (group, layer), or on one rank of it."""
    seed = hashlib.sha256(repr(place).encode() + array("q", tokens).tobytes()).digest()
    return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(size)), dtype=torch.uint8)

"""The executor's place at its agent: requests take cached tokens from the pool, or from another agent, and leave theirs.

The vLLM connector's two sides do the work; here the front's event loop turns them in place of an engine's steps. Copies
run on one thread, so that tokens go on to their clients meanwhile, and no side of the executor waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.colocate import kv_layout
from prfaas.colocate.front import Blocks
from prfaas.colocate.model.cache import Cache
from prfaas.connector.counts import add_to_metrics
from prfaas.connector.metadata import ScheduledRequest, Step
from prfaas.connector.scheduler.scheduler import SchedulerSide
from prfaas.connector.settings import ConnectorSettings
from prfaas.connector.transfer_params import EngineRequest, tenant_of
from prfaas.connector.worker.copy_cuda import copier_for
from prfaas.connector.worker.worker import CopyResults, WorkerSide
from prfaas.hashing import HashChain, root_hash

log = logs.get("colocate.pool")

POLL_SECONDS = 0.001  # Used while an answer from the agent or a copy is pending.
MAX_POLL_SECONDS = 0.01  # Used while a transfer is pending, which may take seconds.
IDLE_SECONDS = 0.5  # Used otherwise; bounds the time until a new agent is noticed.


@dataclass(frozen=True)
class PoolSettings:
    """Settings of the pool client; config.py explains them."""

    socket: Path
    instance: str
    model: str
    weights: str  # Distinguishes different weights of one model name.
    tenant: str = ""
    reuse_min_tokens: int = 256
    silence_seconds: float = 2.0


@dataclass(eq=False)
class Visit:
    """One request at the pool.

    `num_cached`: tokens that can be loaded. `blocks`: those that copies are to be made of, until that is answered.
    `params`: the report on the request's transfer once the request has ended; None without a transfer.
    """

    key: str
    prompt: tuple[int, ...]
    tenant: str
    num_cached: int = 0
    blocks: Blocks | None = None
    ended: bool = False
    params: asyncio.Future[dict[str, Any] | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(frozen=True)
class Answers:
    """Whom to tell that copies are made, by request number: `Front.loaded` and `Front.free`.

    `failed`: that a turn has raised, and no request is answered any more.
    """

    loaded: Callable[[int, int], None]
    free: Callable[[int], None]
    failed: Callable[[], None]


class Pool:
    """A `BlockKeeper`. `open` a request, `begin` it under its number; `leave` or `abandon` ends it."""

    def __init__(self, settings: PoolSettings, cache: Cache) -> None:
        """Attach to the agent.

        Raises:
            AgentUnreachable: nobody answers at the socket.
            LayoutError: the agent refuses this executor.
        """
        self._settings = settings
        self._layout, layers = kv_layout.describe(cache, model=settings.model, weights=settings.weights)
        path, instance = str(settings.socket), settings.instance
        worker = AgentClient(path, instance=instance, role="worker", layout=self._layout)
        scheduler = AgentClient(path, instance=instance, role="scheduler")
        item = ConnectorSettings(
            agent_socket=settings.socket,
            silence_seconds=settings.silence_seconds,
            reuse_min_tokens=settings.reuse_min_tokens,
            tenant=settings.tenant,
        )
        self._scheduler = SchedulerSide(
            scheduler,
            kv_layout.block_map(self._layout),
            item,
            directions=("send", "receive"),
            sleeps_when_idle=False,
        )
        self._worker = WorkerSide(worker, layers, self._layout, make_copier=partial(copier_for, device=cache.kv.device))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-copies")
        self._copying: Future[CopyResults] | None = None
        self._keys = count(1)
        self._visits: dict[int, Visit] = {}
        self._numbers: dict[str, int] = {}
        self._complete: dict[int, tuple[int, ...]] = {}  # Tokens of complete requests that wait for their step.
        self._moved = asyncio.Event()
        self._answers: Answers
        self._turning: asyncio.Task[None]

    def start(self, answers: Answers) -> None:
        """Begin to turn, on the running loop."""
        self._answers = answers
        self._turning = asyncio.get_running_loop().create_task(self._turn_forever())
        self._turning.add_done_callback(self._on_turning_end)

    async def close(self) -> None:
        """Leave the agent; it takes back every lease."""
        self._turning.cancel()
        await asyncio.gather(self._turning, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._worker.close()
        self._scheduler.close()

    def _on_turning_end(self, turning: asyncio.Task[None]) -> None:
        if not turning.cancelled() and (error := turning.exception()) is not None:
            log.error("pool.failed", error=f"{type(error).__name__}: {error}")
            self._answers.failed()

    # A request's life

    async def open(self, prompt: tuple[int, ...], parameters: Mapping[str, Any], salt: str = "") -> Visit:
        """Ask what of a prompt is cached, or on its way here; waits as long as the connector's settings say."""
        visit = Visit(f"c{next(self._keys)}", prompt, tenant_of(parameters, salt, default=self._settings.tenant))
        asked = EngineRequest(visit.key, len(prompt), parameters, partial(self._chain, prompt), salt)
        self._scheduler.on_new_request(asked)
        pause = POLL_SECONDS
        try:
            while (found := self._scheduler.num_external_tokens(visit.key, 0)) is None:
                await asyncio.sleep(pause)
                pause = min(MAX_POLL_SECONDS, pause * 1.5)
        except BaseException:
            self.drop(visit)
            raise
        visit.num_cached = found
        return visit

    def begin(self, number: int, visit: Visit) -> None:
        """The request runs under this number from now on."""
        self._visits[number], self._numbers[visit.key] = visit, number

    def drop(self, visit: Visit) -> None:
        """The request will not run."""
        self._finish(visit, None)

    def abandon(self, number: int) -> None:
        """The request has ended before it was complete."""
        visit = self._visits[number]
        self._finish(visit, None)
        if visit.blocks is None:
            self._forget(number)

    def load(self, request: int, blocks: Blocks) -> None:
        """Copy what is cached of a request into its blocks; `Answers.loaded` follows."""
        visit = self._visits[request]
        visit.blocks = blocks
        self._scheduler.on_allocated(visit.key, visit.num_cached, partial(self._tables, blocks))
        self._moved.set()

    def leave(self, request: int, tokens: tuple[int, ...], blocks: Blocks) -> None:
        """Send or keep what a complete request leaves behind; `Answers.free` follows."""
        self._visits[request].blocks = blocks
        self._complete[request] = tokens
        self._moved.set()

    def decode_lost(self, lives: Callable[[int], bool]) -> None:
        """Decode has died. Once this returns nothing touches the blocks that it had lent, now or later."""
        if self._copying is not None:
            self._copying.exception()
        self._complete.clear()
        self._scheduler.on_blocks_lost()
        for number, visit in list(self._visits.items()):
            visit.blocks = None
            if not lives(number):
                self.abandon(number)

    def _finish(self, visit: Visit, tokens: tuple[int, ...] | None) -> bool:
        """End the request at the agent; whether its blocks must be kept until they are copied."""
        if visit.ended:
            return False
        visit.ended = True

        def leaves() -> HashChain | None:
            return None if tokens is None else self._chain(tokens, visit.tenant)

        finished = self._scheduler.on_finished(visit.key, leaves, partial(self._tables, visit.blocks))
        visit.params.set_result(finished.params)
        return finished.keeps_blocks

    def _forget(self, number: int) -> None:
        del self._numbers[self._visits.pop(number).key]

    def _chain(self, tokens: tuple[int, ...], tenant: str) -> HashChain:
        return HashChain(root_hash(self._settings.model, tenant.encode()), tokens)

    def _tables(self, blocks: Blocks | None) -> list[Sequence[int]]:
        return [] if blocks is None else kv_layout.tables(self._layout, blocks.blocks, blocks.slot)

    # Turning

    async def _turn_forever(self) -> None:
        while True:
            await self._turn()
            awaited = any(visit.blocks is not None for visit in self._visits.values())
            try:
                async with asyncio.timeout(POLL_SECONDS if awaited else IDLE_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                pass
            self._moved.clear()

    async def _turn(self) -> None:
        """Run one connector step: plan copies, make them, collect results."""
        complete, self._complete = self._complete, {}
        step = self._scheduler.plan_step(self._scheduled(complete))
        unkept = [number for number, tokens in complete.items() if not self._finish(self._visits[number], tokens)]
        self._copying = self._thread.submit(self._copy, step)
        loaded = await asyncio.wrap_future(self._copying)
        self._copying = None
        self._take(loaded)
        for number in unkept:
            self._free(number)
        add_to_metrics(self._scheduler.counts.take())
        add_to_metrics(self._worker.counts.take())

    def _scheduled(self, complete: Mapping[int, tuple[int, ...]]) -> list[ScheduledRequest]:
        """Requests whose KV is that of their prompt and of nothing else: what a prefill leg sends."""
        return [
            ScheduledRequest(visit.key, len(tokens), partial(self._tables, visit.blocks))
            for number, tokens in complete.items()
            if tokens == (visit := self._visits[number]).prompt
        ]

    def _copy(self, step: Step) -> CopyResults:
        """On the copying thread."""
        self._worker.begin_step(step)
        self._worker.start_loads()
        self._worker.on_forward_end()
        return self._worker.take_results()

    def _take(self, results: CopyResults) -> None:
        self._scheduler.on_loaded(results.loaded, failed=results.failed)
        self._scheduler.on_stored(results.stored)
        for key in results.loaded & self._numbers.keys():
            self._loaded(self._numbers[key], failed=key in results.failed)
        for key in results.stored & self._numbers.keys():
            self._free(self._numbers[key])

    def _loaded(self, number: int, *, failed: bool) -> None:
        visit = self._visits[number]
        if visit.blocks is None:
            return  # A decode process that died had asked.
        visit.blocks = None
        self._answers.loaded(number, 0 if failed else visit.num_cached)
        if visit.ended:
            self._forget(number)

    def _free(self, number: int) -> None:
        if number in self._visits and self._visits[number].blocks is not None:
            self._forget(number)
            self._answers.free(number)

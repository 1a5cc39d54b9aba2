"""Supervisor of the executor: owns the shared memory, starts both sides, and restarts a side that dies."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas import logs, metrics
from prfaas.colocate.device import devices
from prfaas.colocate.front import Front, PeerRings, SideRings
from prfaas.colocate.model import cache
from prfaas.colocate.model.cache import Cache, CacheShape
from prfaas.colocate.model.shape import SHAPES
from prfaas.colocate.pool import Answers, Pool, PoolSettings, Visit
from prfaas.colocate.processes import shared_memory
from prfaas.colocate.processes.forkserver import ForkServer, StartedSide
from prfaas.colocate.processes.ring import clear_wakeups
from prfaas.colocate.processes.setup import SideFds, SideSetup, send_peer_rings, send_setup
from prfaas.colocate.processes.shared_memory import SIDES, Board, Side, Word
from prfaas.connector.transfer_params import direction_of
from prfaas.errors import PrfaasError
from prfaas.model.cost.colocation import ShareTable

log = logs.get("colocate")
MAX_DEATHS = 8  # More within DEATH_WINDOW_SECONDS mean a fault that restarts do not repair.
DEATH_WINDOW_SECONDS = 60.0
STOP_SECONDS = 5.0
NAMES = (*SIDES, "front")


@dataclass(frozen=True)
class ExecutorSettings:
    """Settings of an executor; config.py explains them."""

    shape: str
    cache: CacheShape
    max_rows: int
    max_tokens: int
    seed: int = 1
    dtype: str = "float32"
    partition: str = "none"
    profile: ShareTable | None = None
    itl_slo_seconds: float = 0.05
    dwell_steps: int = 16
    num_threads: int = 0
    pool: PoolSettings | None = None
    max_deaths: int = MAX_DEATHS  # Per minute.


@dataclass
class Generation:
    """Facts about one request beside the tokens. `params` is the report on its transfer, for the response."""

    num_cached: int = 0
    params: dict[str, Any] | None = None


class ExecutorFailed(PrfaasError):
    """The executor has given up. Live requests ended without their last token."""

    def __init__(self) -> None:
        super().__init__("the executor has given up; the log has the reason")


@dataclass(frozen=True)
class Process:
    """Side that runs, or that was requested and is not forked yet; then `started` is None."""

    control: socket.socket
    started: StartedSide | None = None


class Supervisor:
    """`async with Supervisor(settings) as executor: async for token in executor.generate(...)`."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._tensors = devices.allocate(settings.shape, settings.cache, dtype=settings.dtype, seed=settings.seed)
        self._board_fd = shared_memory.create()
        self.board = Board(os.dup(self._board_fd))
        self._wake: dict[str, int] = {name: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for name in NAMES}
        self._pool = None if settings.pool is None else Pool(settings.pool, self._cache())
        self._front = Front(self._wake, self._pool)
        self._processes: dict[Side, Process] = {}
        self._deaths: list[float] = []
        self._failed = False
        self._poll_later: asyncio.TimerHandle | None = None
        self.num_restarts: dict[Side, int] = {"prefill": 0, "decode": 0}

    async def __aenter__(self) -> Supervisor:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._wake["front"], self._on_tokens)
        self._forkserver = ForkServer(self._on_started, self._on_forkserver_death)
        for side, rings in self._front.open().items():
            self._start(side, rings)
        if self._pool is not None:
            self._pool.start(Answers(self._front.loaded, self._front.free, self._fail))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.remove_reader(self._wake["front"])
        for process in self._processes.values():
            process.control.close()
        running = [process.started for process in self._processes.values() if process.started is not None]
        for side in running:
            self._loop.remove_reader(side.pid_fd)
        await asyncio.to_thread(self._forkserver.close)
        for side in running:
            await asyncio.to_thread(_await_end, side)
        if self._pool is not None:
            await self._pool.close()
        self._front.close()
        self.board.close()
        for fd in (*self._wake.values(), self._board_fd, *self._memfds()):
            os.close(fd)

    async def generate(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        stop_token: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        salt: str = "",
        generation: Generation | None = None,
    ) -> AsyncGenerator[int, None]:
        """Yield the answer's tokens as they come. Leaving early cancels the request.

        `parameters` are the router's `kv_transfer_params`; `generation` is filled in before the first token and the end.

        Raises:
            ValueError: the request does not fit into the cache or the model.
            ExecutorFailed: processes died too often, or the pool failed.
        """
        self.check(prompt, max_tokens)
        visit = None if self._pool is None else await self._open(self._pool, prompt, parameters or {}, salt)
        tokens: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        request = self._front.submit(
            prompt,
            max_tokens,
            stop_token=stop_token,
            on_token=lambda *token: tokens.put_nowait(token),
            num_cached=0 if visit is None else visit.num_cached,
        )
        if self._pool is not None and visit is not None:
            self._pool.begin(request, visit)
        generation = generation or Generation()
        generation.num_cached = 0 if visit is None else visit.num_cached
        try:
            finished = False
            while not finished:
                token, finished = await tokens.get()
                if token < 0:
                    raise ExecutorFailed
                if finished and visit is not None and direction_of(parameters or {}):
                    generation.params = await visit.params
                yield token
        finally:
            self._leave(request)

    async def _open(self, pool: Pool, prompt: tuple[int, ...], parameters: Mapping[str, Any], salt: str) -> Visit:
        visit = await pool.open(prompt, parameters, salt)
        if self._failed:
            pool.drop(visit)
            raise ExecutorFailed
        return visit

    def _leave(self, request: int) -> None:
        """End a request whose client is done or gone."""
        if not self._failed and self._front.cancel(request) and self._pool is not None:
            self._pool.abandon(request)

    def check(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise ValueError for a request that can never run, ExecutorFailed when the executor has given up."""
        if self._failed:
            raise ExecutorFailed
        settings, vocab = self._settings, SHAPES[self._settings.shape].vocab
        total = len(prompt) + max_tokens
        if not prompt or max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one answer token")
        if total > settings.max_tokens or settings.cache.blocks_for(total) >= settings.cache.num_blocks:
            raise ValueError(f"prompt and answer take {total} tokens, more than this executor can hold")
        if not all(0 <= token < vocab for token in prompt):
            raise ValueError(f"token ids go from 0 to {vocab - 1}")

    @property
    def is_alive(self) -> bool:
        """Return whether both sides run and requests are accepted."""
        return not self._failed and self._pids().keys() == set(SIDES)

    def _pids(self) -> dict[Side, int]:
        return {side: process.started.pid for side, process in self._processes.items() if process.started is not None}

    def status(self) -> dict[str, object]:
        """Return live requests, process ids, restarts and the board's words."""
        return {
            "live_requests": self._front.num_live,
            "pids": self._pids(),
            "forkserver": self._forkserver.pid,
            "restarts": dict(self.num_restarts),
            **{word.name.lower(): self.board[word] for word in Word},
        }

    def _start(self, side: Side, rings: SideRings) -> None:
        control, side_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._processes[side] = Process(control)
        peer: Side = "decode" if side == "prefill" else "prefill"
        wake = (self._wake[side], self._wake["front"], self._wake[peer])
        fds = SideFds(rings, os.dup(self._board_fd), *wake, memory=tuple(self._memfds()))
        send_setup(control, self._setup(side), fds)
        os.close(fds.board)
        self._forkserver.start(side, side_end)

    def _on_started(self, started: StartedSide) -> None:
        self._processes[started.side] = replace(self._processes[started.side], started=started)
        self._loop.add_reader(started.pid_fd, self._on_death, started.side)
        log.info("side.started", side=started.side, pid=started.pid)

    def _on_forkserver_death(self, lost: list[Side]) -> None:
        """Open another fork server, which takes seconds to load torch. Running sides are not affected."""
        if self._gives_up():
            return
        self._forkserver.open()
        for side in lost:
            self._on_death(side)

    def _on_death(self, side: Side) -> None:
        process = self._processes.pop(side)
        process.control.close()
        if process.started is not None:
            self._loop.remove_reader(process.started.pid_fd)
            os.close(process.started.pid_fd)
        log.warning("side.died", side=side, pid=None if process.started is None else process.started.pid)
        if self._gives_up():
            return
        if side == "prefill":
            self.board[Word.PREFILL_BUSY] = 0  # The writer of this word is gone, so decode need not leave it a share.
        self.num_restarts[side] += 1
        metrics.COLOCATE_RESTARTS.labels(side).inc()
        rings, survivors = self._front.replace(side)
        if side == "decode" and self._pool is not None:
            self._pool.decode_lost(self._front.lives)
        self._give_to_survivor(side, survivors)
        self._start(side, rings)
        self._front.announce(side)

    def _gives_up(self) -> bool:
        """Count a death. Return whether the executor gives up."""
        now = time.monotonic()
        self._deaths = [moment for moment in self._deaths if now - moment < DEATH_WINDOW_SECONDS] + [now]
        if not self._failed and len(self._deaths) > self._settings.max_deaths:
            self._fail()
        return self._failed

    def _give_to_survivor(self, dead: Side, rings: PeerRings) -> None:
        survivor = self._processes.get("decode" if dead == "prefill" else "prefill")
        if survivor is not None:
            send_peer_rings(survivor.control, rings)

    def _fail(self) -> None:
        log.error("executor.failed", deaths=len(self._deaths))
        self._failed = True
        for answer in self._front.give_up():
            answer.on_token(-1, True)
        if self._pool is not None:
            self._pool.decode_lost(self._front.lives)

    def _on_tokens(self) -> None:
        clear_wakeups(self._wake["front"])
        self._poll()

    def _poll(self) -> None:
        if self._poll_later is not None:
            self._poll_later.cancel()
        if not self._failed and not self._front.poll():
            # A ring is full. Its reader is behind and does not wake this process.
            self._poll_later = self._loop.call_later(0.001, self._poll)

    def _setup(self, side: Side) -> SideSetup:
        settings = self._settings
        return SideSetup(
            side,
            settings.shape,
            settings.cache,
            settings.max_rows,
            settings.max_tokens,
            settings.partition,
            tuple(tensor.describe() for tensor in self._tensors),
            settings.profile,
            settings.itl_slo_seconds,
            settings.dwell_steps,
            settings.num_threads,
            hands_over=self._pool is not None,
        )

    def _cache(self) -> Cache:
        settings = self._settings
        return cache.view(SHAPES[settings.shape], settings.cache, self._tensors[1].tensor, self._tensors[2].tensor)

    def _memfds(self) -> list[int]:
        return [tensor.fd for tensor in self._tensors]


def _await_end(side: StartedSide) -> None:
    """Wait for a process whose control socket is closed to end, and kill it after a timeout."""
    if not select.select([side.pid_fd], [], [], STOP_SECONDS)[0]:
        signal.pidfd_send_signal(side.pid_fd, signal.SIGKILL)
        select.select([side.pid_fd], [], [], STOP_SECONDS)
    os.close(side.pid_fd)

"""Client of the agent: sends the KV of a prompt layer by layer, and receives and compares it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    HELD,
    Alive,
    Cancel,
    Message,
    Receive,
    ReceiveReady,
    Release,
    Send,
    SendOpened,
    TransferDone,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.connector.scheduler.liveness import AgentLiveness
from prfaas.errors import PrfaasError
from prfaas.hashing import HashChain
from prfaas.kv.layout import Layout
from prfaas.scheduler.hedge import InboundProgress, decide
from prfaas.types import GroupBlocks, TransferId, TransferOutcome
from tools.paced_engine.kv import NUM_LAYERS, block_content, groups_of

POLL_SECONDS = 0.005
SILENCE_SECONDS = 2.0  # As the connector's `silence_seconds`.


class PoolClient:
    """Connections of a scheduler and a worker, on one event loop."""

    def __init__(self, socket: str, instance: str, layout: Layout) -> None:
        """Attach to the agent, or raise AgentUnreachable or LayoutError."""
        self._layout = layout
        self._worker = AgentClient(socket, instance=instance, role="worker", layout=layout)
        self._scheduler = AgentClient(socket, instance=instance, role="scheduler")
        self._liveness = AgentLiveness(self._scheduler.post, silence_seconds=SILENCE_SECONDS)
        self._progress: dict[TransferId, Sequence[Any]] = {}
        self._answers: dict[TransferId, asyncio.Future[Message]] = {}

    async def run(self) -> None:
        """Read the agent's answers, and attach again after a restart, until cancelled."""
        while True:
            for message in self._scheduler.poll():
                self._take(message)
            self._worker.poll()
            if self._answers and not self._liveness.is_silent:
                self._liveness.beat()
            lost = [client for client in (self._scheduler, self._worker) if not client.connected]
            if lost:
                self._reattach(lost)
            await asyncio.sleep(POLL_SECONDS)

    def _take(self, message: Message) -> None:
        self._liveness.on_message()
        if isinstance(message, Alive):
            self._liveness.on_alive(message.number)
            self._progress = {TransferId(transfer_id): claim for transfer_id, *claim in message.claims}
        if isinstance(message, SendOpened | ReceiveReady | TransferFailed | TransferDone):
            waiting = self._answers.pop(message.transfer_id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _reattach(self, lost: list[AgentClient]) -> None:
        for waiting in self._answers.values():
            waiting.cancel()
        self._answers.clear()
        self._liveness.restart()
        for client in lost:
            client.reattach()

    async def _ask(self, message: Send | Receive, is_late: Callable[[], bool]) -> Message | TransferOutcome:
        """Return the agent's answer, or why there is none."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[message.transfer_id] = answer
        self._scheduler.post(message)
        try:
            while not answer.done():
                if self._liveness.is_silent:
                    return "agent_silent"
                if is_late():
                    return "recomputed"
                await asyncio.wait((answer,), timeout=POLL_SECONDS)
        finally:
            self._answers.pop(message.transfer_id, None)
        return "agent_lost" if answer.cancelled() else answer.result()

    # -- sending

    async def open(
        self, transfer_id: TransferId, grant: bytes, chain: HashChain, trace: str
    ) -> OutboundTransfer | None:
        """Open an outbound transfer; return None if the agent refuses it."""
        groups = groups_of(chain)
        opened: Message | TransferOutcome = "aborted"
        try:
            opened = await self._ask(Send(transfer_id, grant, groups, trace), lambda: False)
        finally:
            if isinstance(opened, str):
                self._scheduler.post(Cancel(transfer_id))
        return OutboundTransfer(self, groups, opened, self.epoch) if isinstance(opened, SendOpened) else None

    @property
    def epoch(self) -> int:
        """Start of the agent that the scheduler is attached to. Slots and handles of other starts are invalid."""
        return self._scheduler.attached.epoch

    @property
    def has_arena(self) -> bool:
        """True if the worker is attached to the same start of the agent."""
        return self._worker.attached.epoch == self.epoch

    def write(self, opened: SendOpened, groups: tuple[GroupBlocks, ...], *, group: int, layer: int) -> None:
        """Write a layer of all blocks of a group, and report it as ready."""
        piece = self._layout.groups[group].layers[layer]
        for block_hash, slot in zip(groups[group].hashes, opened.slots[0][group], strict=True):
            if slot != HELD:
                target = self._slot(slot, piece.offset_bytes, piece.payload_bytes)
                target[:] = block_content(block_hash, layer, piece.payload_bytes)
        self.push(RingEntry(EntryKind.LAYER_READY, opened.handle, group, layer, 0, groups[group].num_blocks))

    def push(self, entry: RingEntry) -> None:
        if self._worker.ring is not None:
            self._worker.ring.push(entry)

    # -- receiving

    async def receive(
        self, transfer_id: TransferId, grant: bytes, chain: HashChain, trace: str, *, local_seconds: float
    ) -> tuple[TransferOutcome, bool]:
        """Receive a transfer and compare its KV; return its outcome, and whether the KV is right.

        Like the connector, give up a transfer that would end later than a local prefill of `local_seconds`.
        """
        groups = groups_of(chain)
        claimed_at = time.monotonic()

        def is_late() -> bool:
            waited = time.monotonic() - claimed_at
            claim = self._progress.get(transfer_id)
            progress = InboundProgress(waited, *claim) if claim else InboundProgress(waited, paused_seconds=waited)
            decision = decide(progress, local_seconds=local_seconds, min_wait_seconds=SILENCE_SECONDS)
            return decision.action == "recompute"

        ready: Message | TransferOutcome = "aborted"
        try:
            question = Receive(transfer_id, grant, chain.at(chain.num_tokens), groups, trace)
            ready = await self._ask(question, is_late)
        finally:
            if isinstance(ready, str):
                self._scheduler.post(Cancel(transfer_id))
        if isinstance(ready, str):
            return ready, True
        if not isinstance(ready, ReceiveReady):
            return (ready.reason if isinstance(ready, TransferFailed) else "agent_lost"), True
        has_arena = self.has_arena
        is_correct = not has_arena or self._is_kv_correct(ready, groups)
        self._scheduler.post(Release(transfer_id))
        return ("completed" if has_arena else "agent_lost"), is_correct

    def _is_kv_correct(self, ready: ReceiveReady, groups: tuple[GroupBlocks, ...]) -> bool:
        return all(
            bytes(self._slot(slot, piece.offset_bytes, piece.payload_bytes))
            == block_content(block_hash, layer, piece.payload_bytes)
            for position, group in enumerate(groups)
            for block_hash, slot in zip(group.hashes, ready.slots[0][position], strict=True)
            for layer, piece in enumerate(self._layout.groups[position].layers)
        )

    def _slot(self, slot: int, offset: int, length: int) -> memoryview:
        attached = self._worker.attached
        start = attached.header_bytes + slot * attached.slot_bytes + offset
        return self._worker.arena[start : start + length]

    def close(self) -> None:
        with contextlib.suppress(PrfaasError):
            self._scheduler.close()
            self._worker.close()


class OutboundTransfer:
    """Open transfer. Call `compute`, then `end`. It does nothing after its agent has restarted."""

    def __init__(self, pool: PoolClient, groups: tuple[GroupBlocks, ...], opened: SendOpened, epoch: int) -> None:
        self._pool, self._groups, self._opened, self._epoch = pool, groups, opened, epoch

    async def compute(self, seconds: float) -> None:
        """Write the layers in order over `seconds`, and the state after the last layer."""
        for layer in range(NUM_LAYERS):
            await asyncio.sleep(seconds / NUM_LAYERS)
            self._write(group=0, layer=layer)
        self._write(group=1, layer=0)
        self._push(RingEntry(EntryKind.FORWARD_ENDED, self._opened.handle, group=1))

    def end(self) -> None:
        self._push(RingEntry(EntryKind.REQUEST_ENDED, self._opened.handle))

    def _write(self, *, group: int, layer: int) -> None:
        if self._is_open:
            self._pool.write(self._opened, self._groups, group=group, layer=layer)

    def _push(self, entry: RingEntry) -> None:
        if self._is_open:
            self._pool.push(entry)

    @property
    def _is_open(self) -> bool:
        return self._pool.epoch == self._epoch and self._pool.has_arena

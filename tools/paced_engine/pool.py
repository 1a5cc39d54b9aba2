"""The paced engine's end of its agent: sends the KV of a prompt layer by layer, receives it and looks at every byte."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    HELD,
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
from prfaas.cachepool.layout import Layout
from prfaas.errors import PrfaasError
from prfaas.hashing import HashChain
from prfaas.types import GroupBlocks, TransferId
from tools.paced_engine.kv import NUM_LAYERS, content, groups_of

POLL_SECONDS = 0.005
RECEIVE_SECONDS = 30.0  # then the prompt is computed here
Received = Literal["right", "wrong", "nothing"]


class Pool:
    """One scheduler's and one worker's connection. Everything runs on one event loop."""

    def __init__(self, socket: str, instance: str, layout: Layout) -> None:
        """Attach. Raises AgentUnreachable or LayoutError."""
        self._layout = layout
        self._worker = AgentClient(socket, instance=instance, role="worker", layout=layout)
        self._scheduler = AgentClient(socket, instance=instance, role="scheduler")
        self._answers: dict[TransferId, asyncio.Future[Message]] = {}

    async def run(self) -> None:
        """Read the agent's answers, and attach again when it was gone, until cancelled."""
        while True:
            for message in self._scheduler.poll():
                self._take(message)
            self._worker.poll()
            lost = [client for client in (self._scheduler, self._worker) if not client.connected]
            if lost:
                self._reattach(lost)
            await asyncio.sleep(POLL_SECONDS)

    def _take(self, message: Message) -> None:
        if isinstance(message, SendOpened | ReceiveReady | TransferFailed | TransferDone):
            waiting = self._answers.pop(message.transfer_id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _reattach(self, lost: list[AgentClient]) -> None:
        for waiting in self._answers.values():
            waiting.cancel()
        self._answers.clear()
        for client in lost:
            client.reattach()

    async def _ask(self, message: Send | Receive) -> Message | None:
        """The agent's answer; None where it is gone or too slow."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[message.transfer_id] = answer
        self._scheduler.post(message)
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                await asyncio.wait((answer,))
        except TimeoutError:
            return None
        finally:
            self._answers.pop(message.transfer_id, None)
        return None if answer.cancelled() else answer.result()

    # -- sending

    async def open(self, transfer_id: TransferId, grant: bytes, chain: HashChain, trace: str) -> Sending | None:
        """Slots for a transfer; None when the agent gives none."""
        groups = groups_of(chain)
        opened = None
        try:
            opened = await self._ask(Send(transfer_id, grant, groups, trace))
        finally:
            if opened is None:
                self._scheduler.post(Cancel(transfer_id))
        return Sending(self, groups, opened, self.epoch) if isinstance(opened, SendOpened) else None

    @property
    def epoch(self) -> int:
        """Of the agent's start whose answers the scheduler has: slots and handles of another one are not to be touched."""
        return self._scheduler.attached.epoch

    @property
    def has_arena(self) -> bool:
        """Whether the worker's arena and ring are of that start too."""
        return self._worker.attached.epoch == self.epoch

    def write(self, opened: SendOpened, groups: tuple[GroupBlocks, ...], *, group: int, layer: int) -> None:
        """One layer of all blocks of a group into its slots, and the word that it is there."""
        piece = self._layout.groups[group].layers[layer]
        for block_hash, slot in zip(groups[group].hashes, opened.slots[0][group], strict=True):
            if slot != HELD:
                where = self._slot(slot, piece.offset_bytes, piece.payload_bytes)
                where[:] = content(block_hash, layer, piece.payload_bytes)
        self.push(RingEntry(EntryKind.LAYER_READY, opened.handle, group, layer, 0, groups[group].num_blocks))

    def push(self, entry: RingEntry) -> None:
        if self._worker.ring is not None:
            self._worker.ring.push(entry)

    # -- receiving

    async def receive(self, transfer_id: TransferId, grant: bytes, chain: HashChain, trace: str) -> Received:
        """What came of a transfer."""
        groups = groups_of(chain)
        ready = None
        try:
            ready = await self._ask(Receive(transfer_id, grant, chain.at(chain.num_tokens), groups, trace))
        finally:
            if ready is None:
                self._scheduler.post(Cancel(transfer_id))
        if not isinstance(ready, ReceiveReady):
            return "nothing"
        found: Received = "nothing"
        if self.has_arena:
            found = "right" if self._is_right(ready, groups) else "wrong"
        self._scheduler.post(Release(transfer_id))
        return found

    def _is_right(self, ready: ReceiveReady, groups: tuple[GroupBlocks, ...]) -> bool:
        return all(
            bytes(self._slot(slot, piece.offset_bytes, piece.payload_bytes))
            == content(block_hash, layer, piece.payload_bytes)
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


class Sending:
    """A transfer that is open; `compute` paces its layers, `end` must follow. It falls silent when its agent has died."""

    def __init__(self, pool: Pool, groups: tuple[GroupBlocks, ...], opened: SendOpened, epoch: int) -> None:
        self._pool, self._groups, self._opened, self._epoch = pool, groups, opened, epoch

    async def compute(self, seconds: float) -> None:
        """Let each layer become ready in its turn, the state with the last one, over so many seconds."""
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

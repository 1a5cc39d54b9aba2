"""The feed of one engine: its KV events over ZeroMQ in order, with lost batches replayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import xxhash
import zmq
import zmq.asyncio

from prfaas import logs, metrics
from prfaas.errors import RemoteProtocolError
from prfaas.index.engine.cache import EngineCache, gpu_layout
from prfaas.index.engine.events import decode_batch
from prfaas.kv.layout import Layout
from prfaas.pool_events import PoolEvent
from prfaas.types import InstanceId

_REMEMBERED = 4096  # Batches kept to distinguish a repeated batch from one of a restarted engine.

BatchVerdict = Literal["next", "known", "gap", "restart"]


class EventSequence:
    """Order of an engine's numbered batches. It does no I/O."""

    def __init__(self) -> None:
        self.last = -1
        self._seen: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def judge(self, number: int, payload: bytes) -> BatchVerdict:
        """Compare a batch with earlier ones. This changes nothing."""
        if number > self.last:
            return "next" if number == self.last + 1 else "gap"
        digest = xxhash.xxh64_intdigest(payload)
        return "known" if (number, digest) in self._seen else "restart"

    def take(self, number: int, payload: bytes) -> None:
        self.last = number
        self._seen.append((number, xxhash.xxh64_intdigest(payload)))

    def restart(self) -> None:
        """Forget everything, for an engine that begins at 0."""
        self.last = -1
        self._seen.clear()


_POLL_SECONDS = 0.2  # Delay at most until an engine's start or end is noticed.
_RETRY_SECONDS = 5.0
_REPLAY_SECONDS = 5.0  # Longest wait for a replayed batch.
_MAX_REPLAY_BYTES = 256 << 20  # vLLM remembers 10,000 batches of 1 to 10 KB.
_BATCH_OBJECT_BYTES = 128
_NUMBER_BYTES = 8
_END = -1  # Number of the message after the last replayed batch.

log = logs.get("index.engine_feed")


class EngineCacheFeed:
    """Follower of one engine's events while it is attached. When it goes, all its blocks are removed."""

    def __init__(
        self,
        instance: InstanceId,
        *,
        events: str,
        replay: str,
        layouts: Callable[[], Sequence[Layout]],
        add_layout: Callable[[Layout], None],
        publish: Callable[[Iterable[PoolEvent]], None],
        check_seconds: float = 5.0,
    ) -> None:
        """Take the endpoints of an engine's KV events and of lost ones (empty if it does not replay them).

        `layouts` returns those of the attached ranks, () unless all are there; `publish` takes events of the tier "gpu".

        After `check_seconds` without a batch the feed asks the engine whether it has sent more.
        """
        self._instance, self._events, self._replay_endpoint = instance, events, replay
        self._layouts_now = layouts
        self._add_layout = add_layout
        self._publish = publish
        self._check_seconds = check_seconds
        self._context = zmq.asyncio.Context.instance()
        self._sequence = EventSequence()

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        while True:
            layouts = tuple(self._layouts_now())
            if layouts:
                await self._follow_if_possible(layouts)
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow_if_possible(self, layouts: tuple[Layout, ...]) -> None:
        try:
            await self._follow(layouts)
        except zmq.ZMQError as error:
            log.warning("engine.events_connect_failed", instance=self._instance, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, layouts: tuple[Layout, ...]) -> None:
        """Follow one life of the engine."""
        own = [gpu_layout(layout, self._instance) for layout in layouts]
        for layout in own:
            self._add_layout(layout)
        cache = EngineCache(own)
        subscriber = self._context.socket(zmq.SUB)
        try:
            subscriber.connect(self._events)
            subscriber.subscribe(b"")
            self._sequence.restart()
            await self._listen(cache, subscriber, layouts)
        finally:
            subscriber.close(linger=0)
            self._publish(cache.clear())

    async def _listen(self, cache: EngineCache, subscriber: zmq.asyncio.Socket, layouts: tuple[Layout, ...]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while tuple(self._layouts_now()) == layouts:
            if await subscriber.poll(_POLL_SECONDS * 1000):
                message = _numbered(await subscriber.recv_multipart())
                if message is None:
                    self._note_malformed("a message without a number")
                else:
                    await self._take(cache, *message)
                due = loop.time() + self._check_seconds
            elif loop.time() >= due:
                await self._replay(cache)
                due = loop.time() + self._check_seconds

    async def _take(self, cache: EngineCache, number: int, payload: bytes) -> None:
        """Take a received batch, after the lost batches before it."""
        verdict = self._sequence.judge(number, payload)
        if verdict == "restart":
            self._restart(cache)
        if verdict in ("gap", "restart"):
            await self._replay(cache)
        self._take_in_order(cache, number, payload)

    def _take_in_order(self, cache: EngineCache, number: int, payload: bytes) -> None:
        """Take a batch before which no other will come. Missing batches are lost, and so is the known state."""
        verdict = self._sequence.judge(number, payload)
        if verdict == "gap":
            log.warning("engine.events_lost", instance=self._instance, after=self._sequence.last, next=number)
            metrics.ENGINE_EVENT_BATCHES.labels(outcome="lost").inc(number - self._sequence.last - 1)
            self._publish(cache.clear())
        if verdict in ("next", "gap"):
            self._apply(cache, number, payload)

    def _apply(self, cache: EngineCache, number: int, payload: bytes) -> None:
        """Apply a batch. After a malformed batch nothing is known any more, since it may have removed anything."""
        self._sequence.take(number, payload)
        before = cache.orphans.copy()
        try:
            changes = cache.apply(decode_batch(payload))
        except RemoteProtocolError as error:
            self._note_malformed(str(error))
            changes = cache.clear()
        else:
            metrics.ENGINE_EVENT_BATCHES.labels(outcome="taken").inc()
        for reason, count in (cache.orphans - before).items():
            metrics.ENGINE_EVENT_ORPHANS.labels(reason=reason).inc(count)
        self._publish(changes)

    def _note_malformed(self, error: str) -> None:
        log.warning("engine.events_malformed", instance=self._instance, error=error)
        metrics.ENGINE_EVENT_BATCHES.labels(outcome="malformed").inc()

    def _restart(self, cache: EngineCache) -> None:
        log.info("engine.restarted", instance=self._instance)
        self._publish(cache.clear())
        self._sequence.restart()

    async def _replay(self, cache: EngineCache) -> None:
        """Take the batches beyond the last one that the engine still remembers.

        The request includes the last batch: an engine that no longer has it, or has a different one, has restarted.
        """
        last = self._sequence.last
        replayed = await self._replayed(max(last, 0))
        if replayed is None:
            return
        if last >= 0 and (not replayed or self._sequence.judge(*replayed[0]) != "known"):
            self._restart(cache)
            replayed = await self._replayed(0) or []
        for number, payload in replayed:
            self._take_in_order(cache, number, payload)

    async def _replayed(self, first: int) -> list[tuple[int, bytes]] | None:
        """Return the batches from `first` on that the engine remembers, or None when it does not answer."""
        if not self._replay_endpoint:
            return None
        dealer = self._context.socket(zmq.DEALER)
        found: list[tuple[int, bytes]] = []
        room_bytes = _MAX_REPLAY_BYTES
        try:
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
            while room_bytes > 0 and await dealer.poll(_REPLAY_SECONDS * 1000):
                message = _numbered(await dealer.recv_multipart())
                if message is None:
                    self._note_malformed("a replayed batch without a number")
                    return None
                if message[0] == _END:
                    return found
                found.append(message)
                room_bytes -= len(message[1]) + _BATCH_OBJECT_BYTES
            log.warning("engine.replay_unfinished", instance=self._instance, first=first, batches=len(found))
            return None
        finally:
            dealer.close(linger=0)


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return a batch's number and content, the last frames of a message, or None when it has another form."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]

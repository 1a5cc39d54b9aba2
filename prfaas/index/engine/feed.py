"""The order of an engine's numbered batches: what is next, what is known, where one is missing, when the engine is another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash
import zmq
import zmq.asyncio

from prfaas import logs, metrics
from prfaas.errors import RemoteProtocolError
from prfaas.index.engine.cache import EngineCache, gpu_layout
from prfaas.index.engine.events import check_endpoint, decode_batch
from prfaas.kv.layout import Layout
from prfaas.pool_events import PoolEvent
from prfaas.types import InstanceId

_REMEMBERED = 4096  # batches by which a repeated one is told from another engine's

Arrival = Literal["next", "known", "gap", "restart"]


class EventSequence:
    """Judges batches by number and content. Sans-io."""

    def __init__(self) -> None:
        self.last = -1
        self._seen: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def judge(self, number: int, payload: bytes) -> Arrival:
        """What a batch is to what was taken before; changes nothing."""
        if number > self.last:
            return "next" if number == self.last + 1 else "gap"
        digest = xxhash.xxh64_intdigest(payload)
        return "known" if (number, digest) in self._seen else "restart"

    def take(self, number: int, payload: bytes) -> None:
        self.last = number
        self._seen.append((number, xxhash.xxh64_intdigest(payload)))

    def restart(self) -> None:
        """Forget everything: an engine begins at 0."""
        self.last = -1
        self._seen.clear()


_POLL_SECONDS = 0.2  # how soon an engine that has gone, or come, is noticed
_RETRY_SECONDS = 5.0
_REPLAY_SECONDS = 5.0  # without a word: what was lost stays lost
_MAX_REPLAY_BYTES = 256 << 20  # vLLM remembers 10,000 batches, of 1 to 10 KB
_BATCH_OBJECT_BYTES = 128
_NUMBER_BYTES = 8
_END = -1  # in place of a number: everything has been repeated

log = logs.get("index.engine_feed")


@dataclass(frozen=True)
class EngineSource:
    """Where an engine publishes its KV events, and where it repeats those that were lost ("" for nowhere).

    Raises:
        ValueError: nothing can be connected to there.
    """

    instance: InstanceId
    events: str
    replay: str = ""

    def __post_init__(self) -> None:
        for endpoint in filter(None, (self.events, self.replay)):
            check_endpoint(endpoint)


class EngineCacheFeed:
    """One engine. While it is attached its events are followed; when it goes, everything of it is taken back."""

    def __init__(
        self,
        source: EngineSource,
        *,
        layouts: Callable[[], Sequence[Layout]],
        add_layout: Callable[[Layout], None],
        publish: Callable[[Iterable[PoolEvent]], None],
        check_seconds: float = 5.0,
    ) -> None:
        """`layouts` are those of its attached ranks, () unless all are there; `publish` takes changes of the tier "gpu".

        After `check_seconds` without a batch the engine is asked whether the last one is still its last.
        """
        self._source = source
        self._layouts_now = layouts
        self._add_layout = add_layout
        self._publish = publish
        self._check_seconds = check_seconds
        self._context = zmq.asyncio.Context.instance()
        self._sequence = EventSequence()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            layouts = tuple(self._layouts_now())
            if layouts:
                await self._follow_if_possible(layouts)
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow_if_possible(self, layouts: tuple[Layout, ...]) -> None:
        try:
            await self._follow(layouts)
        except zmq.ZMQError as error:  # an endpoint that this machine's ZeroMQ cannot connect to
            log.warning("engine.not_followed", instance=self._source.instance, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, layouts: tuple[Layout, ...]) -> None:
        """One life of the engine."""
        own = [gpu_layout(layout, self._source.instance) for layout in layouts]
        for layout in own:
            self._add_layout(layout)
        cache = EngineCache(own)
        subscriber = self._context.socket(zmq.SUB)
        try:
            subscriber.connect(self._source.events)
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
        """One batch as it came, those before it that were lost first."""
        arrival = self._sequence.judge(number, payload)
        if arrival == "restart":
            self._begin_anew(cache)
        if arrival in ("gap", "restart"):
            await self._replay(cache)
        self._take_in_order(cache, number, payload)

    def _take_in_order(self, cache: EngineCache, number: int, payload: bytes) -> None:
        """A batch before which nothing more will come: what is missing there is lost, and nothing before it counts."""
        arrival = self._sequence.judge(number, payload)
        if arrival == "gap":
            log.warning("engine.events_lost", instance=self._source.instance, after=self._sequence.last, next=number)
            metrics.ENGINE_EVENT_BATCHES.labels(outcome="lost").inc(number - self._sequence.last - 1)
            self._publish(cache.clear())
        if arrival in ("next", "gap"):
            self._apply(cache, number, payload)

    def _apply(self, cache: EngineCache, number: int, payload: bytes) -> None:
        """What cannot be read may have been anything: nothing is known to be held after it."""
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
        log.warning("engine.events_malformed", instance=self._source.instance, error=error)
        metrics.ENGINE_EVENT_BATCHES.labels(outcome="malformed").inc()

    def _begin_anew(self, cache: EngineCache) -> None:
        log.info("engine.restarted", instance=self._source.instance)
        self._publish(cache.clear())
        self._sequence.restart()

    async def _replay(self, cache: EngineCache) -> None:
        """Take what the engine still remembers beyond the last batch.

        The last batch is asked for once more: an engine that has it no more, or another one, is in another life.
        """
        last = self._sequence.last
        repeated = await self._repeated(max(last, 0))
        if repeated is None:
            return
        if last >= 0 and (not repeated or self._sequence.judge(*repeated[0]) != "known"):
            self._begin_anew(cache)
            repeated = await self._repeated(0) or []
        for number, payload in repeated:
            self._take_in_order(cache, number, payload)

    async def _repeated(self, first: int) -> list[tuple[int, bytes]] | None:
        """The batches from `first` on that the engine remembers; None when it does not answer."""
        if not self._source.replay:
            return None
        dealer = self._context.socket(zmq.DEALER)
        found: list[tuple[int, bytes]] = []
        room_bytes = _MAX_REPLAY_BYTES
        try:
            dealer.connect(self._source.replay)
            await dealer.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
            while room_bytes > 0 and await dealer.poll(_REPLAY_SECONDS * 1000):
                message = _numbered(await dealer.recv_multipart())
                if message is None:
                    self._note_malformed("a repeated batch without a number")
                    return None
                if message[0] == _END:
                    return found
                found.append(message)
                room_bytes -= len(message[1]) + _BATCH_OBJECT_BYTES
            log.warning("engine.replay_without_end", instance=self._source.instance, first=first, batches=len(found))
            return None
        finally:
            dealer.close(linger=0)


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """A batch's number and content, the last frames of a message; None when it is none of vLLM's."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]

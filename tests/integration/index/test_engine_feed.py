"""vLLM's own publisher and event classes on one side, the index on the other: replay, gaps, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import zmq
from prometheus_client import REGISTRY

from prfaas.hashing import HashChain, root_hash
from prfaas.index.engine.feed import EngineCacheFeed
from prfaas.index.inventory import Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import Query
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import PoolEvent
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName, ClusterName, InstanceId, Shard
from tests.support.waiting import until

kv_events = pytest.importorskip("vllm.distributed.kv_events")

pytestmark = pytest.mark.vllm
NODE = AgentName("n1")
LAYERS = (LayerSlice("layer", 0, 64, "bfloat16", "token"),)
LAYOUT = Layout("m", "", Shard(), (KVGroup("full_attention", 16, LAYERS),))
TOKENS = list(range(1600))
CHAIN = HashChain(root_hash("m"), TOKENS)


class Engine:
    """Publishes as vLLM's scheduler does; each `grow` is a batch of one block."""

    def __init__(self, events: str, replay: str, *, buffer_steps: int = 1000) -> None:
        self.publisher = kv_events.ZmqEventPublisher(0, events, replay, buffer_steps)
        self.num_blocks = 0

    def grow(self, count: int, *, extra: object = None) -> None:
        for _ in range(count):
            block, self.num_blocks = self.num_blocks, self.num_blocks + 1
            event = kv_events.BlockStored(
                block_hashes=[b"hash %d" % block],
                parent_block_hash=b"hash %d" % (block - 1) if block else None,
                token_ids=TOKENS[block * 16 : block * 16 + 16],
                block_size=16,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[extra] if extra else None,
                group_idx=0,
            )
            self.publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[event]))

    def shrink(self) -> None:
        self.num_blocks -= 1
        gone = kv_events.BlockRemoved(block_hashes=[b"hash %d" % self.num_blocks], medium="GPU", group_idx=0)
        self.publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[gone]))

    def clear(self) -> None:
        self.publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[kv_events.AllBlocksCleared()]))

    def close(self) -> None:
        self.publisher.shutdown()


class Followed:
    """A feed, and the index that it ends in."""

    def __init__(self, directory: Path) -> None:
        self.events, self.replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        self.layouts: list[Layout] = [LAYOUT]
        self.index, self._inventory = Index(), Inventory()
        self._feed = EngineCacheFeed(
            InstanceId("e1"),
            events=self.events,
            replay=self.replay,
            layouts=lambda: self.layouts,
            add_layout=self._add,
            publish=self._publish,
            check_seconds=0.3,
        )
        self.task = asyncio.create_task(self._feed.run())
        self._engines: list[Engine] = []

    def _add(self, layout: Layout) -> None:
        self._inventory.add_layout(layout)
        self.index.register(NODE, cluster=ClusterName("east"), epoch=1, layouts=self._inventory.layouts)

    def _publish(self, events: Iterable[PoolEvent]) -> None:
        self.index.apply(NODE, self._inventory.apply(events))

    def engine(self, *, buffer_steps: int = 1000) -> Engine:
        self._engines.append(Engine(self.events, self.replay, buffer_steps=buffer_steps))
        return self._engines[-1]

    def usable_blocks(self) -> int:
        """Return the prompt's blocks in the engine's own memory. No other tier may count them."""
        query = Query("m", b"".join(CHAIN.units), len(TOKENS))
        assert not self.index.match(query).nodes
        nodes = self.index.match(query, tiers=frozenset({"gpu"})).nodes
        return nodes[0].usable_tokens // 16 if nodes else 0

    async def until_blocks(self, count: int) -> None:
        await until(lambda: bool(self.index.models()) and self.usable_blocks() == count, what=f"{count} blocks")

    async def close(self) -> None:
        await cancel_tasks((self.task,))
        for engine in self._engines:
            await asyncio.to_thread(engine.close)


@pytest.fixture
async def followed(tmp_path: Path) -> AsyncIterator[Followed]:
    started = Followed(tmp_path)
    yield started
    await started.close()


async def test_earlier_events_are_replayed_and_new_events_followed(followed: Followed) -> None:
    engine = followed.engine()
    engine.grow(20)
    await followed.until_blocks(20)
    engine.grow(3)
    await followed.until_blocks(23)
    engine.shrink()
    await followed.until_blocks(22)
    engine.clear()
    await followed.until_blocks(0)


async def test_a_restarted_engine_replaces_its_former_blocks(followed: Followed) -> None:
    first = followed.engine()
    first.grow(9)
    await followed.until_blocks(9)
    await asyncio.to_thread(first.close)
    second = followed.engine()
    second.grow(4)
    await followed.until_blocks(4)


async def test_lost_batches_cost_their_blocks_and_the_feed_goes_on(
    followed: Followed,
) -> None:
    followed.layouts = []  # Nobody listens yet, since the engine is not attached.
    engine = followed.engine(buffer_steps=3)
    engine.grow(10)
    await until(lambda: [number for number, _ in engine.publisher._buffer] == [7, 8, 9])
    followed.layouts = [LAYOUT]
    await until(lambda: bool(followed.index.models()))
    engine.clear()
    engine.num_blocks = 0
    engine.grow(2)
    await followed.until_blocks(2)


async def test_lost_batches_void_the_known_blocks(followed: Followed) -> None:
    engine = followed.engine(buffer_steps=6)
    engine.grow(5)
    await followed.until_blocks(5)
    publisher, loud = engine.publisher, engine.publisher._pub
    publisher._pub = publisher._ctx.socket(zmq.PUB)  # Nobody hears this socket.
    engine.grow(12)
    await until(lambda: [number for number, _ in publisher._buffer] == [*range(11, 17)])
    publisher._pub.close(linger=0)
    publisher._pub = loud
    await followed.until_blocks(0)
    engine.clear()
    engine.num_blocks = 0
    engine.grow(3)
    await followed.until_blocks(3)


async def test_malformed_batches_are_counted_and_the_feed_goes_on(followed: Followed) -> None:
    engine = followed.engine()
    engine.grow(3)
    await followed.until_blocks(3)
    before = num_malformed()
    for frames in ([b"alone"], [b"", b"short", b""]):
        engine.publisher._pub.send_multipart(frames)
    await until(lambda: num_malformed() == before + 2, what="two messages that are no batches")
    engine.grow(1)
    await followed.until_blocks(4)


async def test_an_unreachable_endpoint_does_not_end_the_feed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(tmp_path / ("long" * 30))  # A Unix socket's path cannot be that long.
    await until(lambda: "engine.events_connect_failed" in caplog.text, what="a word on it")
    assert not followed.task.done()
    await followed.close()


def num_malformed() -> float:
    return REGISTRY.get_sample_value("prfaas_agent_engine_event_batches_total", {"outcome": "malformed"}) or 0.0

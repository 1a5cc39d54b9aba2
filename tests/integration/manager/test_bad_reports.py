"""Invalid reports of a node are refused and counted, and change nothing else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal
from prfaas.index.inventory import Inventory
from prfaas.index.membership import Node
from prfaas.index.segments import Announcement, Holding, Segment
from prfaas.manager.daemon import Manager
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import batch_message, node_message
from prfaas.types import AgentName, ClusterName
from tests.support.deployment import SECRET, Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import PATIENCE_SECONDS

LAYOUT = hybrid_layout()
CHAIN = chain_of(640)
NODE = AgentName("n1")
EPOCH = 7


class Speaker:
    """A node that says whatever a test has it say, and hears each answer."""

    def __init__(self, manager: Manager, channel: Channel) -> None:
        self._world = manager.world
        self.channel = channel
        self._call: Any = None

    def begin(self) -> None:
        """Open a stream, and say nothing on it."""
        self._call = self.channel.stream("ReportEvents")

    async def greet(self) -> pb.ReportEventsResponse:
        self.begin()
        return await self.say(pb.ReportEventsRequest(hello=pb.Hello(node=NODE, epoch=EPOCH)))

    async def tell(self, request: pb.ReportEventsRequest) -> None:
        """Say what has no answer."""
        with self.channel.translated_errors():
            await self._call.write(request)

    async def say(self, request: pb.ReportEventsRequest) -> pb.ReportEventsResponse:
        """Raises IndexRefusal: the manager ends the stream."""
        await self.tell(request)
        with self.channel.translated_errors():
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await self._call.read()
        assert isinstance(response, pb.ReportEventsResponse), "the manager has ended the stream without a word"
        return response

    async def batch(self, sequence: int, told: list[Announcement], *, reset: bool = False) -> pb.ReportEventsResponse:
        return await self.say(pb.ReportEventsRequest(batch=batch_message(sequence, told, reset=reset)))

    def is_known_as(self, inventory: Inventory) -> bool:
        """Return whether the manager knows exactly these blocks of the node."""
        return not self._world.differs(NODE, inventory.digests())


@pytest.fixture
async def speaker(deployment: Deployment) -> AsyncIterator[Speaker]:
    manager = await deployment.start_manager()
    channel = Channel(manager.address, name=NODE, secret=SECRET)
    node = Node(NODE, ClusterName("east"), "pd", "n1:7400", EPOCH, (LAYOUT,), ())
    await channel.call("Register", pb.RegisterRequest(node=node_message(node)), timeout_seconds=PATIENCE_SECONDS)
    greeted_speaker = Speaker(manager, channel)
    await greeted_speaker.greet()
    yield greeted_speaker
    await channel.close()


def told(inventory: Inventory, length: int) -> list[Announcement]:
    """Return the announcements of a node that stored so many tokens."""
    inventory.add_layout(LAYOUT)
    return inventory.apply(stored(LAYOUT, CHAIN, length))


def refused(reason: str) -> float:
    labels = {"call": "ReportEvents", "reason": reason}
    return REGISTRY.get_sample_value("prfaas_manager_refusals_total", labels) or 0.0


def num_gaps() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_full_announcements_total", {"reason": "gap"}) or 0.0


async def test_batches_after_a_gap_wait_for_a_full_announcement(speaker: Speaker) -> None:
    inventory, before = Inventory(), num_gaps()
    first, later = told(inventory, 160), told(inventory, 320)
    assert (await speaker.batch(1, first)).acknowledged == 1
    assert "out of order" in (await speaker.batch(3, later)).announce_everything
    assert num_gaps() == before + 1
    assert not speaker.is_known_as(inventory)
    # The manager had requested a full announcement.
    await speaker.tell(pb.ReportEventsRequest(batch=batch_message(2, later)))
    assert (await speaker.batch(4, inventory.everything(), reset=True)).acknowledged == 4
    assert speaker.is_known_as(inventory)


async def test_impossible_announcement_is_skipped(speaker: Speaker) -> None:
    inventory, before = Inventory(), refused("malformed")
    bad = Segment(Holding(LAYOUT.fingerprint, 0, "memory"), CHAIN.at(16), CHAIN.at(16)[:8], 2, True)
    good = told(inventory, 320)
    assert (await speaker.batch(1, [good[0], bad, *good[1:]])).acknowledged == 1
    assert refused("malformed") == before + 1
    assert speaker.is_known_as(inventory)


async def test_malformed_batch_ends_the_stream(speaker: Speaker) -> None:
    inventory, before = Inventory(), refused("malformed")
    good = batch_message(1, told(inventory, 320))
    spoilt = pb.Batch(sequence=1, holdings=good.holdings, changes=[*good.changes, pb.Change()])
    with pytest.raises(IndexRefusal) as refusal:
        await speaker.say(pb.ReportEventsRequest(batch=spoilt))
    assert (refusal.value.reason, refused("malformed")) == ("malformed", before + 1)
    assert speaker.is_known_as(Inventory())
    assert (await speaker.greet()).resume_after == 0
    assert (await speaker.say(pb.ReportEventsRequest(batch=good))).acknowledged == 1
    assert speaker.is_known_as(inventory)


async def test_stream_without_hello_is_refused(speaker: Speaker) -> None:
    speaker.begin()
    with pytest.raises(IndexRefusal) as refusal:
        await speaker.batch(1, told(Inventory(), 320))
    assert refusal.value.reason == "unknown_node"
    assert speaker.is_known_as(Inventory())

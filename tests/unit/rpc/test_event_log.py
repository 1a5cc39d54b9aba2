"""Event log against an index that takes its batches: resumption, gaps, full announcements."""

from prfaas.hashing import HashChain, root_hash
from prfaas.index.inventory import Inventory
from prfaas.manager.state.world import World
from prfaas.pool_events import BlockRemoved, BlockStored
from prfaas.rpc import event_log
from prfaas.rpc.event_log import EventLog
from prfaas.rpc.generated import manager_pb2 as pb
from tests.unit.index.test_index import DENSE, NODE, blocks
from tests.unit.manager.test_world import node_with


class Manager:
    """The other end: takes batches as a manager does."""

    def __init__(self) -> None:
        self.world = World(expiry_seconds=30.0, clock=lambda: 0.0)
        self.world.register(node_with(DENSE))

    def take(self, messages: list[pb.ReportEventsRequest]) -> list[str]:
        batches = [message.batch for message in messages if message.WhichOneof("message") == "batch"]
        return [self.world.apply_batch(NODE, epoch=1, batch=batch) for batch in batches]

    @property
    def num_blocks(self) -> int:
        return self.world.index.num_blocks()


def new_log() -> EventLog:
    inventory = Inventory()
    inventory.add_layout(DENSE)
    return EventLog(inventory)


def test_unacknowledged_batches_are_sent_again_and_applied_once() -> None:
    log, manager = new_log(), Manager()
    log.publish(blocks(DENSE, range(320)))
    assert manager.take(log.take()) == ["applied"]
    log.publish(blocks(DENSE, range(320, 640)))
    lost = log.take()
    assert [message.batch.sequence for message in lost] == [2]
    log.resume(after=manager.world.sequence(NODE, 1))
    assert manager.take(log.take()) == ["applied"]
    log.resume(after=1)
    assert manager.take(log.take()) == ["known"]
    assert manager.num_blocks == 40


def test_acknowledged_batches_are_dropped() -> None:
    log = new_log()
    log.publish(blocks(DENSE, range(320)))
    log.take()
    log.acknowledge(1)
    log.resume(after=1)
    assert log.take() == []


def test_manager_that_lost_batches_gets_everything() -> None:
    log, manager = new_log(), Manager()
    for start in range(0, 960, 320):
        log.publish(blocks(DENSE, range(start, start + 320)))
        log.take()
    log.acknowledge(2)
    log.resume(after=0)
    messages = log.take()
    assert messages[0].batch.reset
    assert manager.take(messages) == ["applied"]
    assert manager.num_blocks == 60
    assert not manager.world.differs(NODE, dict(log.inventory.digests()))


def test_large_pool_is_announced_in_several_batches() -> None:
    log, manager = new_log(), Manager()
    count = event_log.ANNOUNCEMENTS_PER_BATCH * 64 * 16 + 16
    chain = HashChain(root_hash("m"), [7] * count)
    log.publish(
        BlockStored(DENSE.fingerprint, 0, chain.at(end), chain.at(end - 16), end) for end in range(16, count + 1, 16)
    )
    log.announce_everything()
    messages = log.take()
    assert [message.batch.reset for message in messages] == [True, False]
    assert manager.take(messages) == ["applied", "applied"]
    assert manager.num_blocks == count // 16


def test_single_blocks_are_announced_by_the_cell() -> None:
    log = new_log()
    for event in blocks(DENSE, range(130 * 16)):
        log.publish([event])
    (message,) = log.take()
    assert len(message.batch.changes) == 3
    assert message.ByteSize() < 130 * 10


def test_too_many_untaken_changes_are_announced_as_a_whole() -> None:
    log, manager = new_log(), Manager()
    log.publish(blocks(DENSE, range(320)))
    assert manager.take(log.take()) == ["applied"]
    (held,) = blocks(DENSE, range(320, 336))
    coming_and_going = [held, BlockRemoved(DENSE.fingerprint, 0, held.block_hash)]
    assert log.publish(coming_and_going * (event_log.MAX_UNTAKEN // 2 + 3000))
    log.publish([held])
    log.resume(after=1)
    messages = log.take()
    assert [(message.batch.sequence, message.batch.reset) for message in messages] == [(2, True)]
    assert manager.take(messages) == ["applied"]
    assert manager.num_blocks == 21
    assert not manager.world.differs(NODE, dict(log.inventory.digests()))

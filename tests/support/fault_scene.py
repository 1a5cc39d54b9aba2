"""Setting of the fault tests: both ends with a relay between them, and a check for leaks."""

import gc
import os
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveMemoryFree
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.transport_ends import Far, Near, make_far, make_near
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import LinkShape, Relay

MIB = 1 << 20
SIZES = (MIB, 700_000, 33, 2 * MIB, 1 << 16)
TRANSFER_SECONDS = 0.5
NUM_CONNECTIONS = 4
KEPT_BYTES = 1 << 19  # Memory for outcomes of transfers and for the interpreter itself.
SHORT, LONG = 3, 25
QUARTERS = range(100, 104)  # Seeds of four tests, each of which runs a quarter of a hundred faults.


@dataclass
class Scene:
    """Both ends, the relay between them, and a seeded generator."""

    far: Far
    relay: Relay
    near: Near
    chance: random.Random
    num_held_back: int = 0  # Transfers of which some bytes could not leave.

    def settle(self) -> None:
        """Wait until all connections are made and both ends have forgotten all transfers."""
        far, near, relay = self.far.receiver, self.near.link, self.relay
        wait_until(lambda: near.snapshot().num_connections == NUM_CONNECTIONS, what="the sender's connections")
        wait_until(lambda: far.num_connections == relay.num_connections == NUM_CONNECTIONS, what="the receiver's")
        wait_until(lambda: not near.snapshot().num_transfers, what="the end of all transfers at the sender")
        wait_until(lambda: not far._dispatcher._transfers._transfers, what="the end of all transfers at the receiver")
        self.forget()

    def forget(self) -> None:
        """Drop the memory and the events of earlier transfers."""
        self.far.memory.clear()
        self.far.events.clear()
        self.near.events.clear()


def shape_for(sizes: tuple[int, ...]) -> LinkShape:
    """Return a relay that takes TRANSFER_SECONDS and buffers little, so that the rest waits in the sender."""
    return LinkShape(bytes_per_second=sum(sizes) / TRANSFER_SECONDS, max_queued_pieces=1)


@contextmanager
def scene_for(seed: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Scene]:
    """Yield both ends with a relay between them."""
    far = make_far()
    with closing(far.receiver), Relay(far.address, shape_for(sizes)) as relay:
        near = make_near(relay.address, num_connections=NUM_CONNECTIONS)
        with closing(near.link):
            yield Scene(far, relay, near, random.Random(seed))


@contextmanager
def failure_note(note: str) -> Iterator[None]:
    """Add a note to any exception of the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


@contextmanager
def nothing_stays(settle: Callable[[], None]) -> Iterator[None]:
    """Check that the block leaves no more threads, descriptors and memory than before, each time after `settle`."""
    settle()
    threads, descriptors = threading.active_count(), _num_descriptors()
    tracemalloc.start()
    try:
        yield
        settle()
        wait_until(lambda: threading.active_count() <= threads, what="the end of all threads")
        wait_until(lambda: _num_descriptors() <= descriptors, what="the end of all descriptors")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < KEPT_BYTES
    finally:
        tracemalloc.stop()


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def has_arrived(scene: Scene, transfer_id: bytes, objects: list[bytes], *, deadline: float = PATIENCE_SECONDS) -> bool:
    """Return whether a transfer completed. Checks its bytes, or its reason, and that its memory was freed."""
    far = scene.far
    ended = scene.near.end(transfer_id, seconds=deadline + PATIENCE_SECONDS)
    if transfer_id in far.memory:
        wait_until(lambda: ReceiveMemoryFree(transfer_id) in far.events, what="the far end's memory")
    assert isinstance(ended, SendCompleted | SendFailed)
    is_complete = transfer_id in [event.transfer_id for event in far.of(ReceiveCompleted)]
    if is_complete or isinstance(ended, SendCompleted):
        assert far.contents(transfer_id) == objects
    if isinstance(ended, SendFailed):
        assert ended.reason and ended.message
        return False
    return True

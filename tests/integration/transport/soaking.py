"""What the soaks of the wire share: both ends with a relay between them, and that nothing stays of what was interrupted."""

from __future__ import annotations

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
KEPT_BYTES = 1 << 19  # of memory, after many transfers of megabytes: how those ended, and what the interpreter keeps
SHORT, LONG = 3, 25
QUARTERS = range(100, 104)  # seeds: a hundred times is four tests, each of which ends within a few minutes


@dataclass
class Scene:
    """Both ends, the way between them, and what chance says."""

    far: Far
    relay: Relay
    near: Near
    chance: random.Random
    num_held_back: int = 0  # transfers of which some could not even leave

    def settle(self) -> None:
        """Return once all connections are there and nobody has anything of a transfer."""
        far, near, relay = self.far.receiver, self.near.link, self.relay
        wait_until(lambda: near.snapshot().num_connections == NUM_CONNECTIONS, what="the sender's connections")
        wait_until(lambda: far.num_connections == relay.num_connections == NUM_CONNECTIONS, what="the receiver's")
        wait_until(lambda: not near.snapshot().num_transfers, what="the end of all transfers at the sender")
        wait_until(lambda: not far._dispatcher._transfers._transfers, what="the end of all transfers at the receiver")
        self.forget()

    def forget(self) -> None:
        """Give back what the ends had to keep until it was looked at."""
        self.far.memory.clear()
        self.far.events.clear()
        self.near.events.clear()


def shape_for(sizes: tuple[int, ...]) -> LinkShape:
    """A relay that takes so long for them and holds little of them itself: the rest waits in the sender, as on any link."""
    return LinkShape(bytes_per_second=sum(sizes) / TRANSFER_SECONDS, max_queued_pieces=1)


@contextmanager
def scene_for(seed: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Scene]:
    """Both ends with a relay between them."""
    far = make_far()
    with closing(far.receiver), Relay(far.address, shape_for(sizes)) as relay:
        near = make_near(relay.address, num_connections=NUM_CONNECTIONS)
        with closing(near.link):
            yield Scene(far, relay, near, random.Random(seed))


@contextmanager
def told(what: str) -> Iterator[None]:
    """What fails within says this too."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


@contextmanager
def nothing_stays(settle: Callable[[], None]) -> Iterator[None]:
    """Both ends, as `settle` leaves them, have the same threads, descriptors and memory after this as before."""
    settle()
    threads, descriptors = threading.active_count(), _num_descriptors()
    tracemalloc.start()
    try:
        yield
        settle()
        wait_until(lambda: threading.active_count() <= threads, what="the end of the threads of what was interrupted")
        wait_until(lambda: _num_descriptors() <= descriptors, what="the end of the descriptors of what was interrupted")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < KEPT_BYTES
    finally:
        tracemalloc.stop()


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def has_arrived(scene: Scene, transfer_id: bytes, objects: list[bytes], *, deadline: float = PATIENCE_SECONDS) -> bool:
    """Whether a transfer, which has ended, arrived: then its bytes are right; else it says why. Its memory is free."""
    far = scene.far
    ended = scene.near.end(transfer_id, seconds=deadline + PATIENCE_SECONDS)
    if transfer_id in far.memory:
        wait_until(lambda: ReceiveMemoryFree(transfer_id) in far.events, what="the far end's memory")
    assert isinstance(ended, SendCompleted | SendFailed)
    is_complete = transfer_id in [its.transfer_id for its in far.of(ReceiveCompleted)]
    if is_complete or isinstance(ended, SendCompleted):
        assert [bytes(its) for its in far.memory[transfer_id]] == objects
    if isinstance(ended, SendFailed):
        assert ended.reason and ended.message
        return False
    return True

"""Faults at random moments, again and again: the bytes are right or a reason comes by the deadline, and nothing is left over.

The short form runs each fault a few times with a fixed seed; `make soak` runs each a hundred times.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from prfaas.transport.receiver import ReceiveCompleted, ReceiveFailed, ReceiveMemoryFree
from prfaas.transport.sender import SendCompleted, SendFailed
from tests.integration.transport import far_process
from tests.integration.transport.ends import Far, Near, make_far, make_near, objects_of, send
from tests.waiting import wait_until
from tools.link import Filter, LinkShape, Relay

MIB = 1 << 20
SIZES = (MIB, 700_000, 33, 2 * MIB, 1 << 16)
TOTAL = sum(SIZES)
RATE = 8e6  # of each connection: a transfer takes about 0.15 s
CORRUPTED_DEADLINE_SECONDS = 15.0  # where a length is changed the rest never comes
SHORT, LONG = 3, 25
QUARTERS = range(100, 104)  # seeds: a hundred times is four tests, each of which ends within a few minutes


@dataclass
class Scene:
    """Both ends, the way between them, and what chance says."""

    far: Far
    relay: Relay
    near: Near
    chance: random.Random


@dataclass(frozen=True)
class Fault:
    """`arm` says at which byte it comes, before anything is sent; `strike` does the rest once it has come."""

    arm: Callable[[Relay, int], None]
    strike: Callable[[Relay, float], None]


def _kill_one(relay: Relay, _: float) -> None:
    relay.drop_one()
    relay.release()


def _mend_after(relay: Relay, seconds: float) -> None:
    threading.Event().wait(seconds)  # the fault itself: nobody is reached for so long
    relay.mend()


def _release_after(relay: Relay, seconds: float) -> None:
    threading.Event().wait(seconds)  # the fault itself
    relay.release()


FAULTS = {
    "one connection is killed": (Fault(Relay.hold_after, _kill_one), 0.0),
    "all connections are killed": (Fault(Relay.cut_after, _mend_after), 0.0),
    "the link is down for 3 s": (Fault(Relay.cut_after, _mend_after), 3.0),
    "nothing is read for 5 s": (Fault(Relay.hold_after, _release_after), 5.0),
}
SHORT_RATIO = 0.1  # of how long the fault lasts, in the short form


@pytest.fixture
def scene() -> Iterator[Callable[[int], Scene]]:
    """Makes one."""
    made: list[Scene] = []

    def make(seed: int) -> Scene:
        far = make_far()
        relay = Relay(far.address, LinkShape(bytes_per_second=RATE)).__enter__()
        made.append(Scene(far, relay, make_near(relay.address), random.Random(seed)))
        return made[-1]

    yield make
    for its in made:
        its.near.link.close()
        its.relay.__exit__(None, None, None)
        its.far.receiver.close()


def _check(scene: Scene, transfer_id: bytes, objects: list[bytes]) -> bool:
    """Whether it arrived; if not it must have failed with a reason."""
    ended = scene.near.end(transfer_id)
    wait_until(lambda: ReceiveMemoryFree(transfer_id) in scene.far.events, what="the far end's memory")
    assert isinstance(ended, SendCompleted | SendFailed)
    if isinstance(ended, SendFailed):
        assert ended.reason and ended.message
        return False
    assert [bytes(its) for its in scene.far.memory[transfer_id]] == objects
    return True


def _run(scene: Scene, fault: Fault, *, lasts_seconds: float, count: int) -> None:
    for number in range(count):
        objects = objects_of(*SIZES, seed=number)
        fault.arm(scene.relay, scene.chance.randrange(TOTAL * 4 // 5))
        transfer_id = send(scene.near, objects)
        wait_until(lambda: scene.relay.is_held or scene.relay.is_cut)
        fault.strike(scene.relay, lasts_seconds)
        assert _check(scene, transfer_id, objects)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_transfer_survives(name: str, scene: Callable[[int], Scene]) -> None:
    fault, seconds = FAULTS[name]
    _run(scene(1), fault, lasts_seconds=SHORT_RATIO * seconds, count=SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_transfer_survives_a_hundred_times(name: str, seed: int, scene: Callable[[int], Scene]) -> None:
    fault, seconds = FAULTS[name]
    _run(scene(seed), fault, lasts_seconds=seconds, count=LONG)


def _flip_one_byte(chance: random.Random) -> Callable[[], Filter]:
    """Of the first connection that carries so many bytes, the handshake left alone."""
    left = [chance.randrange(1000, TOTAL // 4)]

    def new_filter() -> Filter:
        seen = 0

        def change(data: bytes) -> bytes:
            nonlocal seen
            at, seen = left[0] - seen, seen + len(data) if left else seen
            if not left or not 0 <= at < len(data):
                return data
            left.clear()
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]

        return lambda data: change(data) if left else data

    return new_filter


def _corrupt(scene: Scene, count: int) -> int:
    """How many of so many transfers arrived; those that did are right."""
    arrived = 0
    for number in range(count):
        scene.relay.filter(_flip_one_byte(scene.chance))
        objects = objects_of(*SIZES, seed=number)
        arrived += _check(scene, send(scene.near, objects, deadline=CORRUPTED_DEADLINE_SECONDS), objects)
    return arrived


def test_a_byte_that_is_changed_on_the_way_never_arrives(scene: Callable[[int], Scene]) -> None:
    assert _corrupt(scene(3), SHORT) >= 1


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_a_byte_that_is_changed_on_the_way_never_arrives_a_hundred_times(
    seed: int, scene: Callable[[int], Scene]
) -> None:
    assert _corrupt(scene(seed), LONG) >= LONG - 2


def _kill_receivers(count: int, *, seed: int) -> None:
    chance = random.Random(seed)
    far = far_process.start("127.0.0.1:0")
    address = far_process.next_line(far)
    with Relay(address, LinkShape(bytes_per_second=RATE)) as relay:
        near = make_near(relay.address)
        for number in range(count):
            objects = objects_of(*SIZES, seed=number)
            relay.hold_after(chance.randrange(TOTAL * 4 // 5))
            transfer_id = send(near, objects)
            wait_until(lambda: relay.is_held)
            _kill(far)
            far = far_process.start(address)
            assert far_process.next_line(far) == address
            relay.release()
            assert isinstance(near.end(transfer_id), SendCompleted)
            assert far_process.next_line(far) == f"{transfer_id.hex()} {far_process.digest_of(objects)}"
        near.link.close()
    _kill(far)


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_transfer_to_a_receiver_that_is_killed_goes_to_the_next_one() -> None:
    _kill_receivers(2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_a_transfer_to_a_receiver_that_is_killed_goes_to_the_next_one_a_hundred_times(seed: int) -> None:
    _kill_receivers(LONG, seed=seed)


def _kill_senders(count: int, *, seed: int) -> None:
    """What a killed sender had begun ends with a reason, and its memory is free."""
    chance = random.Random(seed)
    far = make_far(reconnect_seconds=0.5)
    with Relay(far.address, LinkShape(bytes_per_second=RATE)) as relay:
        for _ in range(count):
            relay.hold_after(chance.randrange(10 * MIB))
            command = [sys.executable, "-m", "tests.integration.transport.near_process", relay.address]
            near = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            wait_until(lambda: relay.is_held)
            _kill(near)
            relay.release()
            wait_until(lambda: not relay.num_connections, what="all that it said")
            wait_until(lambda: not far.receiver.num_connections, what="the end of its connections")
            wait_until(lambda: len(far.of(ReceiveMemoryFree)) == len(far.memory), what="the killed sender's memory")
            assert len(far.of(ReceiveCompleted)) + len(far.of(ReceiveFailed)) == len(far.memory)
            far.memory.clear()
            far.events.clear()
    far.receiver.close()


def test_a_killed_sender_leaves_nothing_behind() -> None:
    _kill_senders(2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_a_killed_sender_leaves_nothing_behind_a_hundred_times(seed: int) -> None:
    _kill_senders(LONG, seed=seed)

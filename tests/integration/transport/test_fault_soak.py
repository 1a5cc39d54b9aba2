"""Faults at random moments: the bytes arrive intact, and nothing is left behind.

The short form runs each fault a few times with a fixed seed. `make soak` runs each a hundred times. A failure names the
seed, the number of the transfer, and the byte at which the fault came.
"""

import random
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import pytest

from benchmarks.transport.link_ends import Ends
from prfaas.transport.receiver.api import ReceiveFailed, ReceiveMemoryFree
from tests.support.end_processes import EndProcess, digest_of
from tests.support.fault_scene import (
    LONG,
    MIB,
    NUM_CONNECTIONS,
    QUARTERS,
    SHORT,
    SIZES,
    Scene,
    failure_note,
    has_arrived,
    nothing_stays,
    scene_for,
    shape_for,
)
from tests.support.transport_ends import Near, make_far, make_near, objects_of, send
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import LinkShape, Relay
from tools.wan import Wan, WanShape, obstacle

MANY = (MIB,) * 32  # More than all buffers on the path can hold.
SENT_MIB, KILLED_BYTES = 64, 32 * MIB  # A sender is killed within the first half.
OUTAGE_SECONDS = 1.5
SLOW = WanShape(100e6, 0.020)


@dataclass(frozen=True)
class Fault:
    """Fault that `arm` schedules at a byte before anything is sent. `strike` completes it when it has come."""

    arm: Callable[[Relay, int], None]
    strike: Callable[[Scene, float], None]
    lasts_seconds: float = 0.0
    num_lost: int = NUM_CONNECTIONS  # Connections that the fault ends.
    sizes: tuple[int, ...] = SIZES


def _kill_one(scene: Scene, _: float) -> None:
    scene.relay.drop_connection()
    scene.relay.release()


def _mend_after(scene: Scene, seconds: float) -> None:
    threading.Event().wait(seconds)  # Duration of the fault.
    scene.relay.restore()


def _release_after(scene: Scene, seconds: float) -> None:
    threading.Event().wait(seconds)  # Duration of the fault.
    scene.num_held_back += scene.near.link.snapshot().queued_bytes > 0
    scene.relay.release()


FAULTS = {
    "one connection is killed": Fault(Relay.hold_after, _kill_one, num_lost=1),
    "all connections are killed": Fault(Relay.cut_after, _mend_after),
    "the link is down for 3 s": Fault(Relay.cut_after, _mend_after, lasts_seconds=3.0),
    "nothing is read for 5 s": Fault(Relay.hold_after, _release_after, lasts_seconds=5.0, num_lost=0, sizes=MANY),
}
SHORT_RATIO = 0.1  # Scale of the duration of faults in the short form.


def _run(fault: Fault, *, seed: int, count: int) -> None:
    with scene_for(seed, fault.sizes) as scene:
        _send_undisturbed(scene, fault)
        with nothing_stays(scene.settle):
            for number in range(count):
                _interrupt(scene, fault, number=number)
        assert fault.num_lost or scene.num_held_back > count // 2, "the sender was held back"


def _send_undisturbed(scene: Scene, fault: Fault) -> None:
    objects = objects_of(*fault.sizes)
    assert has_arrived(scene, send(scene.near, objects), objects)


def _interrupt(scene: Scene, fault: Fault, *, number: int) -> None:
    num_before, at = scene.relay.num_accepted, scene.chance.randrange(sum(fault.sizes) * 4 // 5)
    with failure_note(f"transfer {number}, interrupted at byte {at}"):
        objects = objects_of(*fault.sizes, seed=number)
        fault.arm(scene.relay, at)
        transfer_id = send(scene.near, objects)
        wait_until(lambda: scene.relay.is_held or scene.relay.is_cut, what="the fault")
        fault.strike(scene, fault.lasts_seconds)
        assert has_arrived(scene, transfer_id, objects)
        num_after = num_before + fault.num_lost
        wait_until(lambda: scene.relay.num_accepted >= num_after, what="new connections")
        assert fault.num_lost or scene.relay.num_accepted == num_before, "no connection was lost"
    scene.forget()


@pytest.mark.parametrize("name", list(FAULTS))
def test_transfer_survives_a_fault(name: str) -> None:
    fault = FAULTS[name]
    _run(replace(fault, lasts_seconds=SHORT_RATIO * fault.lasts_seconds), seed=1, count=SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
@pytest.mark.parametrize("name", list(FAULTS))
def test_transfer_survives_a_hundred_faults(name: str, seed: int) -> None:
    _run(FAULTS[name], seed=seed, count=LONG)


def _lose_every_packet(count: int, *, seed: int) -> None:
    """Drop every packet of a busy link for a while. Its connections stay, and TCP retransmits."""
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    chance, num_bytes, num_struck = random.Random(seed), 4 * MIB, 0
    with Wan(SLOW) as wan, Ends(wan, pool_bytes=num_bytes, silence_seconds=PATIENCE_SECONDS) as ends:
        usual = ends.transfer(num_bytes, num_layers=16).seconds
        # On a busy machine a transfer may end before the fault.
        for _ in range(2 * count):
            outage = threading.Thread(target=_drop_out, args=(wan, chance.random() * usual / 2))
            outage.start()
            num_struck += ends.transfer(num_bytes, num_layers=16).seconds > OUTAGE_SECONDS
            outage.join()
            if num_struck == count:
                return
    pytest.fail(f"{num_struck} of {2 * count} transfers were struck")


def _drop_out(wan: Wan, after_seconds: float) -> None:
    threading.Event().wait(after_seconds)
    wan.set(replace(SLOW, loss=1.0))
    threading.Event().wait(OUTAGE_SECONDS)  # Duration of the fault.
    wan.set(SLOW)


@pytest.mark.root
def test_transfer_survives_the_loss_of_every_packet() -> None:
    _lose_every_packet(1, seed=1)


@pytest.mark.root
@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_transfer_survives_a_hundred_losses_of_every_packet(seed: int) -> None:
    _lose_every_packet(LONG, seed=seed)


def _kill_receivers(count: int, *, seed: int) -> None:
    chance, far = random.Random(seed), EndProcess("receive", "127.0.0.1:0", PATIENCE_SECONDS)
    with Relay(far.line(), shape_for(SIZES)) as relay:
        near = make_near(relay.address, num_connections=NUM_CONNECTIONS)

        def settle() -> None:
            wait_until(lambda: near.link.snapshot().num_connections == relay.num_connections == NUM_CONNECTIONS)
            assert not near.link.snapshot().num_transfers
            near.events.clear()

        with closing(near.link):
            near.assert_completed(send(near, objects_of(10)))
            far.next("completed")
            with nothing_stays(settle):
                for number in range(count):
                    at = chance.randrange(sum(SIZES) * 4 // 5)
                    with failure_note(f"transfer {number}, interrupted at byte {at}"):
                        relay.hold_after(at)
                        far = _kill_receiver(far, near, relay, objects_of(*SIZES, seed=number))
    far.close()


def _kill_receiver(far: EndProcess, near: Near, relay: Relay, objects: list[bytes]) -> EndProcess:
    """Kill the receiver and return its successor, at which everything has arrived."""
    transfer_id = send(near, objects)
    wait_until(lambda: relay.is_held, what="the fault")
    far.close()
    far = EndProcess("receive", relay.target, PATIENCE_SECONDS)
    assert far.line() == relay.target
    relay.release()
    near.assert_completed(transfer_id)
    outcome, _, *received = far.line().split()
    assert (outcome, received) == ("completed", [transfer_id.hex(), digest_of(objects)])
    return far


def test_transfer_continues_at_the_successor_of_a_killed_receiver() -> None:
    _kill_receivers(2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_transfer_continues_after_a_hundred_killed_receivers(seed: int) -> None:
    _kill_receivers(LONG, seed=seed)


def _kill_senders(count: int, *, seed: int) -> None:
    """Check that transfers of killed senders fail with a reason, and that their memory is freed."""
    chance, far, num_interrupted = random.Random(seed), make_far(silence_seconds=0.5), 0

    def settle() -> None:
        wait_until(lambda: not relay.num_connections, what="the end of its connections at the relay")
        wait_until(lambda: not far.receiver.num_connections, what="the end of its connections")
        wait_until(lambda: len(far.of(ReceiveMemoryFree)) == len(far.memory), what="the killed sender's memory")
        far.memory.clear()
        far.events.clear()

    shape = LinkShape(max_queued_pieces=1)
    with closing(far.receiver), Relay(far.address, shape) as relay, nothing_stays(settle):
        for number in range(count):
            at = chance.randrange(KILLED_BYTES)
            with failure_note(f"sender {number}, killed at byte {at}"):
                relay.hold_after(at)
                _kill_sender(relay)
                wait_until(lambda: len(far.of(ReceiveFailed)) == len(far.memory), what="the failure of its transfers")
                assert all(event.reason == "unreachable" for event in far.events if isinstance(event, ReceiveFailed))
                num_interrupted += len(far.memory)
                settle()
    assert num_interrupted >= count - 1


def _kill_sender(relay: Relay) -> None:
    near = EndProcess("send", relay.address, SENT_MIB, PATIENCE_SECONDS)
    wait_until(lambda: relay.is_held, what="the fault")
    near.close()
    relay.release()


def test_killed_sender_leaves_nothing_behind() -> None:
    _kill_senders(2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_a_hundred_killed_senders_leave_nothing_behind(seed: int) -> None:
    _kill_senders(LONG, seed=seed)

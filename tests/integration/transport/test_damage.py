"""Bits that change on the path: nothing arrives damaged, failures have a reason, and nothing is left behind."""

import threading

import pytest

from prfaas.transport.protocol.wire import HEADER_BYTES, MAGIC
from tests.support.fault_scene import (
    LONG,
    QUARTERS,
    SHORT,
    SIZES,
    Scene,
    failure_note,
    has_arrived,
    nothing_stays,
    scene_for,
)
from tests.support.transport_ends import objects_of, send

DEADLINE_SECONDS = 15.0  # A changed length may leave both ends waiting.
ANSWERED_BYTES = 8 * HEADER_BYTES  # Replies of any transfer: HAVE, some ACKs, DONE.
KINDS = ("any byte", "a header", "an answer")


class Damage:
    """Filter that changes one bit each time that it is armed."""

    def __init__(self) -> None:
        self.num_done = 0
        self._lock = threading.Lock()
        self._left: int | None = None  # Bytes until the change.
        self._place: int | None = None  # Offset in the next header.
        self._bit = 0

    def arm(self, *, after_bytes: int, place: int | None, bit: int) -> None:
        """Schedule a change of a byte after `after_bytes`, or of a place in the next header after them."""
        with self._lock:
            self._left, self._place, self._bit = after_bytes, place, bit

    def change(self, data: bytes) -> bytes:
        """Return the bytes, possibly damaged."""
        with self._lock:
            if self._left is None:
                return data
            at, self._left = self._left, max(0, self._left - len(data))
            if self._place is not None:
                header = data.find(MAGIC, at)
                at = header + self._place if 0 <= header <= len(data) - HEADER_BYTES else len(data)
            if at >= len(data):
                return data
            self._left = None
            self.num_done += 1
            return data[:at] + bytes([data[at] ^ 1 << self._bit]) + data[at + 1 :]


def _damage_many(count: int, *, seed: int) -> None:
    forward, back, num_arrived = Damage(), Damage(), 0
    with scene_for(seed) as scene:
        scene.relay.filter(lambda: forward.change, back=back.change)
        objects = objects_of(*SIZES)
        assert has_arrived(scene, send(scene.near, objects), objects)
        with nothing_stays(scene.settle):
            for number in range(count):
                num_arrived += _damage(scene, forward, back, number=number)
    assert forward.num_done + back.num_done == count
    assert num_arrived >= 2 * count // 3


def _damage(scene: Scene, forward: Damage, back: Damage, *, number: int) -> bool:
    """Damage a transfer and return whether it arrived."""
    kind, chance = KINDS[number % len(KINDS)], scene.chance
    after_bytes = chance.randrange(ANSWERED_BYTES if kind == "an answer" else sum(SIZES) // 2)
    if kind == "a header" and chance.random() < 0.5:
        after_bytes = 0  # OPEN has the first header.
    place, bit = chance.randrange(HEADER_BYTES) if kind == "a header" else None, chance.randrange(8)
    with failure_note(f"transfer {number}: {kind}, {after_bytes=}, {place=}, {bit=}"):
        (back if kind == "an answer" else forward).arm(after_bytes=after_bytes, place=place, bit=bit)
        objects = objects_of(*SIZES, seed=number)
        transfer_id = send(scene.near, objects, deadline=DEADLINE_SECONDS)
        arrived = has_arrived(scene, transfer_id, objects, deadline=DEADLINE_SECONDS)
    scene.forget()
    return arrived


def test_damaged_bytes_never_arrive() -> None:
    _damage_many(SHORT, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", QUARTERS)
def test_a_hundred_damaged_transfers_never_arrive_damaged(seed: int) -> None:
    _damage_many(LONG, seed=seed)

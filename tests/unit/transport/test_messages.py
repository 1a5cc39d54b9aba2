"""Bodies of control frames and object sizes: each is decoded as encoded; malformed and oversized ones are refused."""

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import (
    MAX_MESSAGE_CHARACTERS,
    MAX_OBJECTS,
    MAX_RUNS,
    MAX_SLABS,
    Challenge,
    EndReason,
    Have,
    Hello,
    ObjectSizes,
    Open,
)
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Area, Ranges, Slab

ID = bytes(range(16))
nonces = st.binary(min_size=32, max_size=32)
names = st.text(min_size=1, max_size=40)
words = st.lists(st.text(max_size=10), max_size=4).map(tuple)
runs = st.lists(st.tuples(st.integers(1, 1 << 32), st.integers(1, 1000)), max_size=20)
object_sets = st.sets(st.integers(0, 300)).map(lambda numbers: Ranges((index, index + 1) for index in numbers))
slabs = st.builds(Slab, st.integers(0, 99), st.integers(1, 99), st.integers(0, 1 << 40), st.integers(1, 1 << 20))
areas = st.lists(slabs, max_size=10).map(lambda parts: tuple(Area(parts).slabs()))


def _parts(frame: bytes) -> tuple[Header, bytes]:
    return Header.decode(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]


@given(st.builds(Hello, names, nonces, st.lists(st.integers(0, 255), max_size=4).map(tuple), words))
def test_hello_is_decoded_as_encoded(hello: Hello) -> None:
    assert messages.decode_hello(_parts(messages.encode_hello(hello))[1]) == hello


@given(st.builds(Challenge, names, nonces, st.integers(0, 255), words, st.binary(min_size=16, max_size=16), nonces))
def test_challenge_is_decoded_as_encoded(challenge: Challenge) -> None:
    assert messages.decode_challenge(_parts(messages.encode_challenge(challenge))[1]) == challenge


@given(runs, st.integers(0, 7), st.floats(0.1, 1e6), st.binary(max_size=200))
def test_open_is_decoded_as_encoded(
    size_runs: list[tuple[int, int]], priority: int, seconds: float, body: bytes
) -> None:
    header, payload = _parts(messages.encode_open(ID, Open(ObjectSizes(size_runs), priority, seconds, body)))
    opened = messages.decode_open(header, payload)
    assert (opened.sizes.runs, opened.priority, opened.deadline_seconds, opened.body) == (
        ObjectSizes(size_runs).runs,
        priority,
        seconds,
        body,
    )


@given(object_sets, areas)
def test_have_is_decoded_as_encoded(held: Ranges, arrived: tuple[Slab, ...]) -> None:
    header, payload = _parts(messages.encode_have(ID, Have(held, arrived)))
    assert messages.decode_have(header, payload, num_objects=301) == Have(held, arrived)


def test_a_have_of_more_objects_than_its_transfer_has_takes_no_memory() -> None:
    structure = msgpack.packb([[]])
    payload = structure + b"\x55" * (MAX_OBJECTS // 8)
    header = Header(FrameType.HAVE, len(payload), ID, offset=len(structure))
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="objects") as refused:
        messages.decode_have(header, payload, num_objects=MAX_OBJECTS - 8)
    assert refused.value.reason == "range"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_longest_have_fits_its_frame() -> None:
    longest = 1 << 62
    slabs = tuple(Slab(longest, (1 << 32) - 1, longest + at, 1 << 61) for at in range(MAX_SLABS))
    held = Ranges([(MAX_OBJECTS - 1, MAX_OBJECTS)])
    assert Header.decode(messages.encode_have(ID, Have(held, slabs))[:HEADER_BYTES]).type is FrameType.HAVE


@pytest.mark.parametrize(
    "arrived",
    [
        [Slab(0, 5, 0, 10), Slab(4, 5, 0, 10)],  # Overlap.
        [Slab(5, 5, 0, 10), Slab(0, 5, 0, 10)],  # An earlier object of the same column.
        [Slab(0, 5, 0, 10), Slab(5, 5, 5, 10)],  # Overlapping columns.
        [Slab(0, 5, 10, 10), Slab(0, 5, 0, 10)],  # An earlier column.
        [*(Slab(0, 1, 2 * at, 1) for at in range(1000)), Slab(0, 1, 0, 2000)],  # The last overlaps all before.
    ],
)
def test_a_have_with_overlapping_or_unordered_slabs_is_refused(arrived: list[Slab]) -> None:
    structure = msgpack.packb([arrived])
    with pytest.raises(RemoteProtocolError, match="order"):
        messages.decode_have(
            Header(FrameType.HAVE, len(structure), ID, offset=len(structure)), structure, num_objects=9
        )


def test_an_unknown_reason_reads_as_protocol_and_a_long_message_is_cut() -> None:
    frame = messages.encode_ending(FrameType.ERROR, ID, EndReason("deadline", "x" * 9999))
    assert messages.decode_ending(_parts(frame)[1]) == EndReason("deadline", "x" * MAX_MESSAGE_CHARACTERS)
    assert messages.decode_ending(msgpack.packb(["made up", "why"])) == EndReason("protocol", "why")


@pytest.mark.parametrize(
    "body",
    [
        [[[0, 1]], 0, 1.0],  # An object of no bytes.
        [[[1, 1]], 0, 0.0],
        [[[1, 1]], 0, float("nan")],
        [[[1, 1]], 0, float("inf")],
        [[[1, 1]], -1, 1.0],
        [[[1, 1]], True, 1.0],
        [[[1]], 0, 1.0],
        [[b"\x01\x01"], 0, 1.0],
        [[{1: 1, 2: 2}], 0, 1.0],
        [{}, 0, 1.0],
        [[], 0, 1],
        [5, 0, 1.0],
        [[[1, 1]], 0],
        {"sizes": 1},
        7,
    ],
)
def test_a_malformed_open_is_refused(body: object) -> None:
    structure = msgpack.packb(body)
    with pytest.raises(RemoteProtocolError):
        messages.decode_open(Header(FrameType.OPEN, len(structure), ID, offset=len(structure)), structure)


def test_a_first_part_longer_than_its_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="first part"):
        messages.decode_open(Header(FrameType.OPEN, 3, ID, offset=4), b"abc")


plain_sizes = st.lists(st.integers(1, 9), max_size=30)


@given(plain_sizes)
def test_object_sizes_read_like_a_list(plain: list[int]) -> None:
    made = ObjectSizes.of(plain)
    assert list(made) == plain and len(made) == len(plain) and made.total_bytes == sum(plain)
    assert ObjectSizes.of(made) is made


@given(plain_sizes, st.builds(Slab, st.integers(0, 31), st.integers(1, 31), st.integers(0, 9), st.integers(1, 9)))
def test_a_slab_fits_if_every_object_has_its_bytes(plain: list[int], slab: Slab) -> None:
    expected = slab.last <= len(plain) and all(plain[i] >= slab.end for i in range(slab.first, slab.last))
    assert ObjectSizes.of(plain).holds(slab) == expected


@given(plain_sizes, st.data())
def test_bytes_of_objects_are_the_sum_of_their_sizes(plain: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(plain) - 1))) if plain else set()
    assert ObjectSizes.of(plain).bytes_of(Ranges((i, i + 1) for i in chosen)) == sum(plain[i] for i in chosen)


def test_neighbours_of_equal_size_are_one_run() -> None:
    assert ObjectSizes([(5, 1)] * 1000 + [(6, 2), (6, 3)]).runs == [(5, 1000), (6, 5)]


@pytest.mark.parametrize(
    "runs", [[(0, 1)], [(1, 0)], [(1, MAX_OBJECTS + 1)], [(1, MAX_OBJECTS), (2, 1)], [(1, 1), (2, 1)] * MAX_RUNS]
)
def test_sizes_out_of_bounds_are_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"objects in|object sizes must be"):
        ObjectSizes(runs)

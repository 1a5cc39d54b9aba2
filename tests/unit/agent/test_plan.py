"""Transfer plans, which number the same blocks equally on both sides, and bodies of OPENs."""

import tracemalloc
from dataclasses import replace

import msgpack
import pytest

from prfaas.agent.transfer.open_body import MAX_LAYOUT_BYTES, MAX_LAYOUTS_BYTES, CopiedPrefix, OpenBody, read_grant
from prfaas.agent.transfer.plan import make_plan
from prfaas.errors import LayoutError, RemoteProtocolError
from prfaas.hashing import NO_HASH, HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.transport.protocol.messages import MAX_BODY_BYTES
from prfaas.types import GroupBlocks, Shard

ROOT = root_hash("m")
NUM_TOKENS = 100
CHAIN = HashChain(ROOT, range(NUM_TOKENS))


def _layer(name: str, offset: int, size: int, dtype: str = "float32") -> LayerSlice:
    return LayerSlice(name, offset, size, dtype, "head,token,kv_dim")


def _layout(rank: int = 0, size: int = 1, *, dtypes: tuple[str, str, str] = ("float32",) * 3) -> Layout:
    """Return a layout; `dtypes` are those of the two full-attention layers and the window layer."""
    full = KVGroup("full_attention", 32, (_layer("a", 0, 100, dtypes[0]), _layer("b", 100, 60, dtypes[1])))
    window = KVGroup("sliding_window", 16, (_layer("w", 0, 50, dtypes[2]),), window_tokens=20)
    state = KVGroup("linear_state", 32, (_layer("s", 0, 300),))
    return Layout("m", "", Shard(rank, size), (full, window, state))


GROUPS = (
    GroupBlocks(0, 0, CHAIN.blocks(32, first_block=0, num_tokens=NUM_TOKENS), ROOT),
    GroupBlocks(1, 4, CHAIN.blocks(16, first_block=4, num_tokens=NUM_TOKENS), CHAIN.at(64)),
    GroupBlocks(2, 0, (CHAIN.at(NUM_TOKENS),), CHAIN.at(96)),
)


def test_objects_are_numbered_by_rank_then_group_then_block() -> None:
    plan = make_plan((_layout(0, 2), _layout(1, 2)), GROUPS, NUM_TOKENS)
    one_rank = [160] * 4 + [50] * 3 + [300]
    assert plan.object_bytes == one_rank * 2
    assert [objects.first_object for objects in plan.ranges] == [0, 4, 7, 8, 12, 15]
    assert plan.range_of(1, 1).first_object == 12
    assert plan.nested(list(range(16)))[1] == [[8, 9, 10, 11], [12, 13, 14], [15]]
    assert (plan.total_bytes, plan.attention_bytes) == (2 * 1090, 2 * 790)


def test_block_identities_have_length_and_parent() -> None:
    plan = make_plan((_layout(),), GROUPS, NUM_TOKENS)
    full, window, state = (list(plan.identities(objects)) for objects in plan.ranges)
    assert [(i.num_tokens, i.parent) for i in full[:2]] == [(32, ROOT), (64, CHAIN.at(32))]
    assert full[3].block_hash == NO_HASH
    assert [(i.num_tokens, i.block_hash) for i in window[:2]] == [(80, CHAIN.at(80)), (96, CHAIN.at(96))]
    assert window[0].parent == CHAIN.at(64)
    assert (full[3].parent, full[3].before) == (CHAIN.at(96), CHAIN.at(96))
    assert (state[0].num_tokens, state[0].block_hash, state[0].parent) == (100, CHAIN.at(100), CHAIN.at(96))


def test_checkpoint_without_attention_blocks_names_its_tenant() -> None:
    """The root hash decides whose share the block counts for."""
    groups = (GroupBlocks(0, 0, (), ROOT), *GROUPS[1:])
    plan = make_plan((_layout(),), groups, NUM_TOKENS)
    assert {identity.root for objects in plan.ranges for identity in plan.identities(objects)} == {ROOT}
    assert plan.object_bytes == [50] * 3 + [300]


@pytest.mark.parametrize(
    "blocks",
    [GroupBlocks(3, 0, (NO_HASH,)), GroupBlocks(0, 2, (NO_HASH,) * 3), GroupBlocks(2, 0, (NO_HASH,) * 2)],
    ids=["no such group", "beyond the prompt", "two states"],
)
def test_block_lists_beyond_the_prompt_are_refused(blocks: GroupBlocks) -> None:
    with pytest.raises(RemoteProtocolError, match="group"):
        make_plan((_layout(),), (blocks,), NUM_TOKENS)


def test_open_body_survives_a_round_trip() -> None:
    opened = OpenBody(b"grant", (_layout().fingerprint,), (_layout(),), GROUPS)
    assert OpenBody.decode(opened.encode()) == opened
    copied = replace(opened, groups=(), copied=CopiedPrefix(bytes(48), ROOT))
    assert OpenBody.decode(copied.encode()) == copied and copied.is_copy


def test_open_body_without_trace_has_no_trace_field() -> None:
    untraced, traced = (OpenBody(b"grant", (b"f",), (), GROUPS, trace=trace) for trace in ("", "00-trace"))
    assert len(msgpack.unpackb(untraced.encode())) == 5, "what an older agent takes"
    assert OpenBody.decode(traced.encode()) == traced


_COPY_OF_A_SHORT_ROOT = msgpack.packb(["copy", b"g", [b"f"], [], [bytes(48), bytes(15)]])


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", b"\x95\xa4open\xc4\x00\x90\x90\x90", _COPY_OF_A_SHORT_ROOT])
def test_malformed_open_body_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        OpenBody.decode(body)


# Unpacked, these take a gigabyte.
EMPTY_LISTS = b"\xdd" + (15 << 20).to_bytes(4, "big") + b"\x90" * (15 << 20)


@pytest.mark.parametrize("before", [b"", b"\x95", b"\x95\xa4open", b"\x95\xa4open\xc4\x05grant"])
def test_open_body_with_too_many_items_takes_no_memory(before: bytes) -> None:
    body = before + EMPTY_LISTS
    for decode in (read_grant, OpenBody.decode):
        tracemalloc.start()
        if decode is read_grant and before.endswith(b"grant"):
            assert read_grant(body) == (b"grant", "transfer")
            at_most = 1 << 16
        else:
            with pytest.raises(RemoteProtocolError) as refused:
                decode(body)
            assert refused.value.reason == "open_body"
            at_most = 1 << 16 if decode is read_grant else len(body) + (1 << 16)
        assert tracemalloc.get_traced_memory()[1] < at_most, "of a beginning nothing, else a copy"
        tracemalloc.stop()


def test_unpacking_layouts_takes_bounded_memory() -> None:
    begin = b"\x91\x81\xa6groups\xdd"
    items = MAX_LAYOUT_BYTES - len(begin) - 3
    packed = begin + items.to_bytes(4, "big") + b"\x80" * items
    opened = b"\x95\xa4open\xc4\x05grant\x91\xc4\x01f"
    tracemalloc.start()
    with pytest.raises(LayoutError):
        OpenBody.decode(opened + packed + b"\x90")
    assert tracemalloc.get_traced_memory()[1] < 80 * MAX_LAYOUT_BYTES
    tracemalloc.stop()
    with pytest.raises(RemoteProtocolError, match="limit"):
        OpenBody.decode(opened + packed.replace(items.to_bytes(4, "big"), (items + 1).to_bytes(4, "big")) + b"\x80\x90")
    with pytest.raises(RemoteProtocolError, match="limit"):
        OpenBody.decode(opened + b"\x95" + packed[1:] * (MAX_LAYOUTS_BYTES // MAX_LAYOUT_BYTES + 1) + b"\x90")


def test_unwanted_layouts_are_skipped_unread() -> None:
    asked: list[tuple[object, int]] = []

    def wants_none(fingerprints: tuple[bytes, ...], num_bytes: int) -> bool:
        asked.append((fingerprints, num_bytes))
        return False

    malformed = msgpack.packb([{"groups": [{}] * 1000}])
    body = OpenBody(b"g", (b"f",), (), GROUPS).encode().replace(b"\x90", malformed, 1)
    assert OpenBody.decode(body, wants_layouts=wants_none) == OpenBody(b"g", (b"f",), (), GROUPS)
    assert asked == [((b"f",), len(malformed))]
    with pytest.raises(LayoutError):
        OpenBody.decode(body)


def test_hashes_of_an_open_take_at_most_eight_times_its_bytes() -> None:
    num_hashes = MAX_BODY_BYTES // 8 // 16
    groups = (GroupBlocks(0, 0, (NO_HASH,) * num_hashes, ROOT),)
    body = OpenBody(b"g", (b"f",), (), groups).encode()
    tracemalloc.start()
    assert OpenBody.decode(body).groups[0].num_blocks == num_hashes
    assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    tracemalloc.stop()


def test_open_body_of_32_ranks_and_128_layers_is_read() -> None:
    layers = tuple(_layer(f"model.layers.{at}.self_attn.attn", 100 * at, 100, "bfloat16") for at in range(128))
    ranks = tuple(Layout("m" * 64, "", Shard(rank, 32), (KVGroup("full_attention", 32, layers),)) for rank in range(32))
    opened = OpenBody(b"grant", tuple(rank.fingerprint for rank in ranks), ranks, GROUPS)
    assert OpenBody.decode(opened.encode()) == opened


@pytest.mark.parametrize(
    "fields",
    [
        ["open", 1 << 20, [b"f"], [], []],
        ["open", b"g", [1 << 63], [], []],
        ["open", b"g", ["text"], [], []],
        ["copy", b"g", [b"f"], [], [1 << 20, bytes(16)]],
        ["copy", b"g", [b"f"], [], [b"", 1 << 20]],
    ],
)
def test_open_body_with_numbers_in_place_of_bytes_is_refused(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError, match="not bytes"):
        OpenBody.decode(msgpack.packb(fields))


def test_deeply_nested_bodies_are_refused() -> None:
    deep = b"\xa5model" + b"\x91" * 1000 + b"\x90"
    encoded = OpenBody(b"g", (b"f",), (_layout(),), GROUPS).encode()
    body = encoded.replace(b"\xa5model\xa1m", deep)
    assert body != encoded
    with pytest.raises(LayoutError, match="model: list is the wrong type"):
        OpenBody.decode(body)

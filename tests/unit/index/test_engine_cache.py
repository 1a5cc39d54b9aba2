"""vLLM's events become blocks of our chain; whatever cannot be placed for certain becomes nothing."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.hashing import HashChain, root_hash
from prfaas.index.engine.cache import EngineCache, gpu_layout
from prfaas.index.engine.events import EngineRemoved, EngineStored, check_endpoint, decode_batch
from prfaas.index.engine.feed import EventSequence
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import InstanceId, Shard

LAYERS = (LayerSlice("layer", 0, 64, "bfloat16", "token"),)
FULL, WINDOW = KVGroup("full_attention", 32, LAYERS), KVGroup("sliding_window", 32, LAYERS, 64)
STATE = KVGroup("linear_state", 16, LAYERS)
TOKENS = list(range(320))
CHAIN = HashChain(root_hash("m"), TOKENS)


def cache_of(*groups: KVGroup, ranks: int = 1) -> EngineCache:
    layouts = [Layout("m", "", Shard(rank, ranks), groups) for rank in range(ranks)]
    return EngineCache([gpu_layout(layout, InstanceId("e1")) for layout in layouts])


def stored(
    first: int, last: int, *, group: int | None = 0, hashes: list[int] | None = None, **fields: Any
) -> EngineStored:
    """Blocks `first` to `last` (excluded) of 32 tokens; the engine's hash of block i is 100 + i."""
    values: dict[str, Any] = {
        "hashes": tuple(hashes if hashes is not None else range(100 + first, 100 + last)),
        "parent": 99 + first if first else None,
        "token_ids": tuple(TOKENS[first * 32 : last * 32]),
        "block_tokens": 32,
        "group": group,
        "has_extras": False,
    }
    return EngineStored(**(values | fields))


def ends(events: list[PoolEvent]) -> list[tuple[int, int]]:
    """(group, tokens) of what is stored, each hash compared with our own chain's."""
    found = [event for event in events if isinstance(event, BlockStored)]
    assert all(event.block_hash == CHAIN.at(event.num_tokens) and event.tier == "gpu" for event in found)
    return [(event.group, event.num_tokens) for event in found]


def as_map(name: str, fields: dict[str, Any]) -> Any:
    return {"type": name, **fields}


def test_each_kind_of_event_is_decoded() -> None:
    fields: dict[str, Any] = {
        "block_hashes": [7, b"x" * 32],
        "parent_block_hash": None,
        "token_ids": [1] * 32,
        "block_size": 16,
    }
    fields |= {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None, None], "group_idx": 1}
    gone = {"block_hashes": [7], "medium": "GPU", "group_idx": 1}
    events = [as_map("BlockStored", fields), as_map("BlockRemoved", gone), as_map("AllBlocksCleared", {})]
    first, second, third = decode_batch(msgpack.packb([1.5, events, 0]))
    assert first == EngineStored((7, b"x" * 32), None, (1,) * 32, 16, 1, False)
    assert second == EngineRemoved((7,), 1)
    assert type(third).__name__ == "EngineCleared"


@pytest.mark.parametrize(
    "extras",
    [
        {"lora_id": 3},
        {"lora_name": "a", "extra_keys": [["a"], ["a"]]},
        {"extra_keys": [["a", "salt"]]},
        {"extra_keys": [["salt"], [["image", 0]]]},
        {"extra_keys": [None, [["image", 0]]]},
        {"extra_keys": [[b"digest"]]},
        {"parent_block_hash": 6, "extra_keys": [["salt"]]},
    ],
)
def test_adapters_and_images_are_extras(extras: dict[str, Any]) -> None:
    assert first_event(extras).has_extras


def test_a_salt_is_no_extra() -> None:
    event = first_event({"extra_keys": [["acme"], None]})
    assert (event.salt, event.has_extras) == ("acme", False)
    assert first_event({}).salt == ""


def first_event(extras: dict[str, Any]) -> EngineStored:
    """Two blocks that begin a chain, decoded."""
    fields = {"block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1] * 32, "block_size": 16}
    fields |= {"lora_id": None, "medium": None, "lora_name": None, "extra_keys": None}
    (event,) = decode_batch(msgpack.packb([1.5, [as_map("BlockStored", fields | extras)]]))
    assert isinstance(event, EngineStored)
    return event


def test_unknown_media_and_events_are_ignored() -> None:
    offloaded = as_map("BlockRemoved", {"block_hashes": [7], "medium": "CPU"})
    strange = as_map("BlockRemoved", {"block_hashes": [7], "medium": 5})
    assert decode_batch(msgpack.packb([1.5, [offloaded, strange, as_map("BlockBlessed", {})]])) == []


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb([1.5]), msgpack.packb([1.5, [{"type": "BlockStored"}]])]
)
def test_a_malformed_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_batch(payload)


@pytest.mark.parametrize(
    "odd",
    [
        *(
            {"token_ids": [-1] * 16},
            {"token_ids": [1 << 32] * 16},
            {"token_ids": ["a"] * 16},
            {"token_ids": [None] * 16},
        ),
        *({"group_idx": "0"}, {"group_idx": 0.0}, {"parent_block_hash": [7]}, {"block_size": float("inf")}),
    ],
)
def test_a_field_of_a_wrong_type_refuses_the_batch(odd: dict[str, Any]) -> None:
    fields = {"block_hashes": [7], "parent_block_hash": None, "token_ids": [1] * 16, "block_size": 16}
    with pytest.raises(RemoteProtocolError):
        decode_batch(msgpack.packb([1.5, [as_map("BlockStored", fields | odd)]]))


@pytest.mark.parametrize("endpoint", ["n1:5557", "tcp://n1", "tcp://*:5557", "ipc://", "http://n1:1", ""])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        check_endpoint(endpoint)


def test_blocks_are_placed_by_their_parent_and_tokens() -> None:
    cache = cache_of(FULL)
    assert ends(cache.apply([stored(0, 3), stored(3, 5)])) == [(0, 32 * end) for end in range(1, 6)]


def test_blocks_are_announced_for_every_rank() -> None:
    assert [event.layout for event in cache_of(FULL, ranks=2).apply([stored(0, 1)])] == [
        gpu_layout(Layout("m", "", Shard(rank, 2), (FULL,)), InstanceId("e1")).fingerprint for rank in range(2)
    ]


def test_windows_and_states_are_placed_by_the_full_group_in_any_order() -> None:
    cache = cache_of(FULL, WINDOW, STATE)
    window = stored(0, 4, group=1, hashes=[102, 103])
    state = stored(0, 4, group=2, hashes=[103])
    assert ends(cache.apply([window, state, stored(0, 4)])) == [
        *[(0, 32 * end) for end in range(1, 5)],
        *((1, 96), (1, 128), (2, 128)),
    ]
    assert not cache.orphans


def test_a_loaded_window_is_placed_by_the_full_group() -> None:
    cache = cache_of(FULL, WINDOW)
    assert ends(cache.apply([stored(2, 4, group=1), stored(0, 4)])) == [
        (0, 32),
        (0, 64),
        (0, 96),
        (0, 128),
        (1, 96),
        (1, 128),
    ]
    assert ends(cache.apply([stored(4, 5, group=1)])) == [(1, 160)]
    assert not cache.orphans


def test_a_removed_block_stays_known_through_another_group() -> None:
    cache = cache_of(FULL, STATE)
    cache.apply([stored(0, 2), stored(1, 2, group=1)])
    gone = cache.apply([EngineRemoved((100, 101), 0)])
    assert [(type(event), event.group, event.block_hash) for event in gone] == [
        (BlockRemoved, 0, CHAIN.at(32)),
        (BlockRemoved, 0, CHAIN.at(64)),
    ]
    assert ends(cache.apply([stored(2, 3)])) == [(0, 96)]
    cache.apply([EngineRemoved((101,), 1), EngineRemoved((102,), 0)])
    assert len(cache) == 0
    assert cache.apply([stored(3, 4)]) == []
    assert cache.orphans == {"parent": 1}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(1, 2), "parent"),
        (stored(0, 1, has_extras=True), "extras"),
        (stored(0, 1, token_ids=()), "tokens"),
        (stored(0, 1, token_ids=(), block_tokens=0), "tokens"),
        (stored(0, 1, group=4), "layout"),
        (stored(0, 1, group=None), "layout"),
        (stored(0, 2, block_tokens=16, hashes=[1, 2, 3, 4]), "layout"),
        (stored(0, 4, group=1, hashes=[102]), "parent"),
    ],
)
def test_orphans_are_counted_and_never_announced(event: EngineStored, reason: str) -> None:
    cache = cache_of(FULL, WINDOW)
    assert cache.apply([event]) == []
    assert cache.orphans == {reason: len(event.hashes)}


def test_a_salted_chain_is_announced_under_its_tenant() -> None:
    events = cache_of(FULL).apply([stored(0, 2, salt="acme"), stored(2, 3)])
    salted = HashChain(root_hash("m", b"acme"), TOKENS)
    assert [event.block_hash for event in events if isinstance(event, BlockStored)] == [
        salted.at(n) for n in (32, 64, 96)
    ]


def test_an_image_makes_the_rest_of_the_chain_orphans() -> None:
    cache = cache_of(FULL)
    events = cache.apply([stored(0, 2), stored(2, 3, has_extras=True), stored(3, 4)])
    assert ends(events) == [(0, 32), (0, 64)]


def test_a_cleared_cache_removes_every_block() -> None:
    cache = cache_of(FULL, STATE)
    cache.apply([stored(0, 3), stored(2, 3, group=1)])
    assert len(cache.clear()) == 4
    assert len(cache) == 0
    assert cache.apply([stored(3, 4)]) == []


def test_batches_are_next_known_missing_or_from_a_restart() -> None:
    sequence = EventSequence()
    assert sequence.judge(0, b"a") == "next"
    sequence.take(0, b"a")
    sequence.take(1, b"b")
    assert sequence.judge(1, b"b") == "known"
    assert sequence.judge(0, b"other") == "restart"
    assert sequence.judge(5, b"c") == "gap"
    sequence.restart()
    assert sequence.judge(0, b"a") == "next"

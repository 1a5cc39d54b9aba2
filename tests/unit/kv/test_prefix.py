"""A prefix consists of the blocks that a transfer of the same length would have."""

import pytest

from prfaas.connector.block_map import BlockMap
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout, is_well_formed, prefix_groups
from prfaas.kv.parts import LayerSlice
from prfaas.types import BlockHash, Prefix, Shard

ROOT = root_hash("m")
CHAIN = HashChain(ROOT, range(400))
FULL = KVGroup("full_attention", 32)
WINDOW = KVGroup("sliding_window", 16, window_tokens=65)
STATE = KVGroup("linear_state", 0)


def _layout(*groups: KVGroup) -> Layout:
    made = [
        KVGroup(
            group.kind, group.block_tokens, (LayerSlice("l", 0, _SIZES[group.kind], "u8", "t"),), group.window_tokens
        )
        for group in groups
    ]
    return Layout("m", "", Shard(), tuple(made))


_SIZES: dict[str, int] = {"full_attention": 100, "sliding_window": 10, "linear_state": 1}


def _prefix(num_tokens: int) -> Prefix:
    return Prefix("m", b"".join(CHAIN.units[: num_tokens // 16]), num_tokens, CHAIN.at(num_tokens))


@pytest.mark.parametrize("num_tokens", [5, 16, 31, 32, 64, 65, 80, 81, 320, 327, 400])
@pytest.mark.parametrize("groups", [(FULL, STATE), (FULL, WINDOW, STATE), (STATE,)])
def test_a_prefix_has_the_blocks_of_a_transfer_of_its_length(groups: tuple[KVGroup, ...], num_tokens: int) -> None:
    expected = BlockMap(groups).transfer_groups(CHAIN, num_tokens)
    assert prefix_groups(_layout(*groups), _prefix(num_tokens), root=ROOT) == expected


@pytest.mark.parametrize("num_tokens", [32, 64, 320])
def test_without_states_a_prefix_has_only_full_blocks(num_tokens: int) -> None:
    expected = BlockMap((FULL, WINDOW)).transfer_groups(CHAIN, num_tokens)
    layout = _layout(FULL, WINDOW)
    assert prefix_groups(layout, _prefix(num_tokens), root=ROOT) == expected
    assert sum(group.num_blocks for group in prefix_groups(layout, _prefix(num_tokens + 7))) == sum(
        blocks.num_blocks for blocks in expected
    )


@pytest.mark.parametrize(
    "prefix",
    [
        Prefix("m", b"", 0, BlockHash(bytes(16))),
        Prefix("m", bytes(16), 32, BlockHash(bytes(16))),
        Prefix("m", bytes(32), 31, BlockHash(bytes(16))),
        Prefix("m", bytes(16), 31, BlockHash(bytes(15))),
    ],
)
def test_malformed_prefixes_are_detected(prefix: Prefix) -> None:
    assert not is_well_formed(prefix)
    assert is_well_formed(_prefix(31))

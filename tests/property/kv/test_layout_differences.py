"""Any change of a layout is named by `difference`, changes the fingerprint, and survives the way to a peer."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kv.group import KVGroup
from prfaas.kv.kinds import KINDS
from prfaas.kv.layout import Layout, difference
from prfaas.kv.parts import LayerSlice
from prfaas.types import Shard

words = st.text("abcde/", min_size=1, max_size=4)
block_sizes = st.sampled_from([16, 32, 48, 528])


@st.composite
def groups(draw: st.DrawFn) -> KVGroup:
    kind = draw(st.sampled_from(sorted(KINDS)))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    layers, offset = [], 0
    for size in sizes:
        layer = LayerSlice(
            draw(words), offset, size, draw(words), draw(words), draw(st.integers(0, 3)), draw(st.integers(1, 3))
        )
        layers.append(layer)
        offset += size
    window = draw(st.integers(1, 4096)) if KINDS[kind].has_window else None
    return KVGroup(kind, draw(block_sizes), tuple(layers), window_tokens=window)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.integers(1, 4))
    shard = Shard(draw(st.integers(0, size - 1)), size)
    return Layout(draw(words), draw(words), shard, tuple(draw(st.lists(groups(), min_size=1, max_size=3))))


def _layer_changes(layer: LayerSlice) -> list[tuple[str, LayerSlice]]:
    numbers = ("offset_bytes", "payload_bytes", "first_head", "num_heads")
    changed = [(name, replace(layer, **{name: getattr(layer, name) + 1})) for name in numbers]
    texts = ("name", "dtype", "axis_order")
    return changed + [(name, replace(layer, **{name: getattr(layer, name) + "x"})) for name in texts]


def _group_changes(group: KVGroup) -> list[tuple[str, KVGroup]]:
    kind: Any = "linear_state" if group.keeps_all_tokens else "full_attention"
    changed = [
        ("kind", replace(group, kind=kind)),
        ("block_tokens", replace(group, block_tokens=group.block_tokens + 16)),
        ("window_tokens", replace(group, window_tokens=(group.window_tokens or 0) + 1)),
        ("number of layers", replace(group, layers=(*group.layers, group.layers[0]))),
    ]
    for index, layer in enumerate(group.layers):
        for name, new in _layer_changes(layer):
            changed.append((name, replace(group, layers=(*group.layers[:index], new, *group.layers[index + 1 :]))))
    return changed


def _changes(layout: Layout) -> list[tuple[str, Layout]]:
    changed = [
        ("model", replace(layout, model=layout.model + "x")),
        ("packing", replace(layout, packing=layout.packing + "x")),
        ("shard", replace(layout, shard=Shard(layout.shard.rank + 1, layout.shard.size))),
        ("tensor-parallel size", replace(layout, shard=Shard(layout.shard.rank, layout.shard.size + 1))),
        ("number of KV groups", replace(layout, groups=(*layout.groups, layout.groups[0]))),
    ]
    for index, group in enumerate(layout.groups):
        for name, new in _group_changes(group):
            changed.append((name, replace(layout, groups=(*layout.groups[:index], new, *layout.groups[index + 1 :]))))
    return changed


@settings(max_examples=settings().max_examples * 2 // 5)
@given(layouts())
def test_a_change_of_any_field_is_named_and_changes_the_fingerprint(layout: Layout) -> None:
    for name, changed in _changes(layout):
        text = difference(layout, changed)
        assert text is not None and name in text
        assert changed.fingerprint != layout.fingerprint


@settings(max_examples=settings().max_examples * 2 // 5)
@given(layouts())
def test_a_layout_survives_encoding_without_difference(layout: Layout) -> None:
    back = Layout.from_dict(layout.to_dict())
    assert back == layout
    assert back.fingerprint == layout.fingerprint
    assert difference(layout, back) is None

"""A model's layers in order."""

from __future__ import annotations

import pytest

from prfaas.bench.layer_sizes import layer_sizes
from prfaas.model.kv.geometry import Geometry, GroupBytes
from prfaas.solve.files import catalog


def test_layers_of_several_kinds_are_spread_over_the_depth() -> None:
    attention = GroupBytes("full_attention", 2, bytes_per_token=20)
    states = GroupBytes("linear_state", 6, state_bytes=600)
    sizes = layer_sizes(Geometry("hybrid", (attention, states), "made up"), 50)
    assert sizes == [100, 500, 100, 100, 100, 500, 100, 100]


def test_a_window_bounds_its_layers() -> None:
    group = GroupBytes("sliding_window", 2, bytes_per_token=20, window_tokens=10)
    assert layer_sizes(Geometry("windows", (group,), "made up"), 1000) == [100, 100]


@pytest.mark.parametrize("name", catalog.names("models"))
def test_layers_of_every_catalogued_model_add_up_to_its_kv(name: str) -> None:
    geometry = catalog.find_model(name)
    sizes = layer_sizes(geometry, 32_768)
    assert len(sizes) == sum(group.num_layers for group in geometry.groups)
    assert sum(sizes) == pytest.approx(geometry.kv_bytes(32_768), abs=len(sizes))

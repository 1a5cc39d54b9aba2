"""Hybrid models whose kernels run on no CPU: vLLM's specs describe them, and their bytes go through pool and wire."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from prfaas.connector.vllm.kv_layout import Rank, block_map, describe
from prfaas.types import Shard
from tests.support.agent_nodes import NUM_TOKENS, Nodes, prompt_of, receiving, sending
from tests.support.fake_engine import NUM_BLOCKS, FakeEngine, Memory, Running
from tests.support.vllm_caches import KDA, LIGHTNING, config_of, latent

pytestmark = pytest.mark.vllm
LAYERS_PER_GROUP = 2
RATIOS = {"three KDA to one MLA": (KDA, 3), "seven lightning to one MLA": (LIGHTNING, 7)}
MLA_BLOCK_TOKENS = 64  # Its page is larger than either state, as in vLLM.


def hybrid(ratio: str, model: str) -> Memory:
    """Return an engine's blocks of such a model, as the connector describes them."""
    linear, count = RATIOS[ratio]
    groups = [([f"linear.{group}.{n}" for n in range(LAYERS_PER_GROUP)], linear) for group in range(count)]
    full = ([f"full.{n}" for n in range(LAYERS_PER_GROUP)], latent(MLA_BLOCK_TOKENS))
    config = config_of(*groups, full, num_blocks=NUM_BLOCKS)
    layout, layers = describe(config, shared_caches(config), Rank(model, Shard(), 1), packing="p")
    return Memory(layout, layers, block_map(config).groups)


def shared_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Return caches in which, as in vLLM, the n-th layers of all groups share a tensor and states are padded."""
    page = max(group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups)
    raw = [torch.zeros(NUM_BLOCKS, page, dtype=torch.int8) for _ in range(LAYERS_PER_GROUP)]
    caches = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for memory, name in zip(raw, group.layer_names, strict=True):
            if isinstance(spec, MambaSpec):
                caches[name] = memory[:, : spec.state_content_size_bytes].view(NUM_BLOCKS, 1, 1, -1)
            else:
                caches[name] = memory.view(spec.dtype).view(NUM_BLOCKS, 1, spec.block_size, spec.head_size)
    return caches


def _transfer(nodes: Nodes, prefiller: FakeEngine, decoder: FakeEngine) -> Running:
    """Transfer a chunked prefill and return the decode request that may load it."""
    prompt = prompt_of(1)
    grant = nodes.grant(prompt)
    parked, prefilling = receiving(decoder, prompt, grant), sending(prefiller, prompt, grant)
    prefiller.await_answer(prefilling)
    prefiller.prefill(prefilling, chunk_tokens=100)
    prefiller.finish(prefilling)
    assert decoder.await_answer(parked) == NUM_TOKENS
    return parked


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_byte_arrives(nodes: Nodes, ratio: str) -> None:
    prefiller, decoder = (nodes.attach(agent, hybrid(ratio, nodes.model)) for agent in (nodes.east, nodes.west))
    parked = _transfer(nodes, prefiller, decoder)
    assert decoder.load(parked, NUM_TOKENS)
    assert decoder.wrong_blocks(parked, NUM_TOKENS) == []
    decoder.finish(parked)
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_changed_byte_of_any_group_shows(nodes: Nodes, ratio: str) -> None:
    """Negative control: a byte of each group's slots is changed in the west's pool before the engine loads them."""
    prefiller, decoder = (nodes.attach(agent, hybrid(ratio, nodes.model)) for agent in (nodes.east, nodes.west))
    parked = _transfer(nodes, prefiller, decoder)
    for slots in decoder.slots_of(parked):
        decoder.change_byte(slots[-1])
    assert decoder.load(parked, NUM_TOKENS)
    wrong = decoder.wrong_blocks(parked, NUM_TOKENS)
    assert [(group, layer) for group, layer, _ in wrong] == [(group, 0) for group in range(len(decoder.groups))]

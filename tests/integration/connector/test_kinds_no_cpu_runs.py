"""Hybrid models whose kernels run on no CPU: vLLM's specs describe them, and their bytes go through pool and wire."""

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from prfaas.connector.vllm.kv_layout import Rank, block_map, describe
from prfaas.types import Shard
from tests.support.agent_nodes import Nodes, load_and_finish, prefill_leg, prompt_of, receiving
from tests.support.fake_engine import NUM_BLOCKS, Memory
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


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_byte_arrives(nodes: Nodes, ratio: str) -> None:
    prefiller, decoder = (nodes.attach(agent, hybrid(ratio, nodes.model)) for agent in (nodes.east, nodes.west))
    prompt = prompt_of(1)
    grant = nodes.grant(prompt)
    parked = receiving(decoder, prompt, grant)
    prefill_leg(prefiller, prompt, grant)
    load_and_finish(decoder, parked)
    nodes.assert_nothing_is_left()

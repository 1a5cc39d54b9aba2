"""Hybrid models whose kernels run on no CPU: vLLM's specs describe them, and their bytes go through pool and wire."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from prfaas.connector.vllm.kv_layout import Rank, block_map, describe, num_replicas
from prfaas.types import Shard
from tests.support.agent_nodes import Nodes, leave_prefix, load_and_finish, prompt_of, reuse_prefix
from tests.support.fake_engine import NUM_BLOCKS, Memory
from tests.support.vllm_caches import KDA, LIGHTNING, config_of, latent

pytestmark = pytest.mark.vllm
LAYERS_PER_GROUP = 2
RATIOS = {"three KDA to one MLA": (KDA, 3), "seven lightning to one MLA": (LIGHTNING, 7)}
MLA_BLOCK_TOKENS = 64  # Its page is larger than either state, as in vLLM.


def hybrid(ratio: str, model: str, shard: Shard = Shard()) -> Memory:  # noqa: B008
    """Return one rank's blocks of such a model, as the connector describes them. Ranks divide the states among them."""
    linear, count = RATIOS[ratio]
    *first, (heads, *rest) = linear.shapes
    linear = replace(
        linear, shapes=(*((taps, width // shard.size) for taps, width in first), (heads // shard.size, *rest))
    )
    groups = [([f"linear.{group}.{n}" for n in range(LAYERS_PER_GROUP)], linear) for group in range(count)]
    full = ([f"full.{n}" for n in range(LAYERS_PER_GROUP)], latent(MLA_BLOCK_TOKENS))
    config = config_of(*groups, full, num_blocks=NUM_BLOCKS)
    _, num_pieces = num_replicas(config, num_ranks=shard.size, kv_heads={1})
    rank = Rank(model, shard, {1}, num_pieces)
    layout, layers = describe(config, shared_caches(config), rank, packing="p")
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
    load_and_finish(decoder, nodes.transfer(prefiller, decoder, prompt_of(1)))
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("ratio", RATIOS)
def test_ranks_divide_equal_latents_among_them(nodes: Nodes, ratio: str) -> None:
    """Four ranks send as many bytes as one rank does, although each has all latents, and load them from the pool."""
    sent = []
    for size in (1, 4):
        model = f"{nodes.model}, {size} ranks"
        site = replace(nodes, model=model, engines=nodes.engines)
        engines = []
        for agent, reuse in ((site.east, False), (site.west, True)):
            first, *others = (hybrid(ratio, model, Shard(rank, size)) for rank in range(size))
            settings = {"reuse": True, "reuse_min_tokens": 16} if reuse else {}
            engines.append(site.attach(agent, first, others=others, **settings))
        prefiller, decoder = engines
        load_and_finish(decoder, site.transfer(prefiller, decoder, prompt_of(1)))
        sent.append(site.last_sent()["payload_bytes"])
        leave_prefix(decoder, prompt_of(2))
        reuse_prefix(decoder, prompt_of(2))
        site.assert_nothing_is_left()
    assert sent[1] == sent[0]

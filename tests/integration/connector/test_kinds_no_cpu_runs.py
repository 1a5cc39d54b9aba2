"""Hybrid models whose kernels run on no CPU: vLLM's specs describe them, and their bytes go through pool and wire."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from prfaas.cachepool.arena import shape_of
from prfaas.connector.vllm.kv_layout import Rank, block_map, count_equal_ranks, describe
from prfaas.types import Shard
from tests.support.agent_nodes import Nodes, leave_prefix, load_and_finish, prompt_of, reuse_prefix
from tests.support.fake_engine import NUM_BLOCKS, FakeEngine, Memory
from tests.support.vllm_caches import KDA, LIGHTNING, config_of, latent, state
from tests.support.waiting import wait_until
from tools.demo.client import get_json
from tools.processes import Children
from tools.stack import AgentProcess, Stack

pytestmark = pytest.mark.vllm
LAYERS_PER_GROUP = 2
RATIOS = {"three KDA to one MLA": (KDA, 3), "seven lightning to one MLA": (LIGHTNING, 7)}
TIERS = ("pool", "ssd")
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
    return described(config_of(*groups, full, num_blocks=NUM_BLOCKS), model, shard)


def like_kimi_linear(model: str, shard: Shard) -> Memory:
    """Return one rank's blocks of a smaller Kimi Linear: three groups of KDA layers and one of MLA, all of four layers.

    As in vLLM, the tokens of a block make its page as large as the rank's share of a state.
    """
    linear = state(MambaAttentionBackendEnum.GDN_ATTN, (3, 8192 // shard.size), (32 // shard.size, 64, 64))
    groups = [([f"linear.{group}.{n}" for n in range(4)], linear) for group in range(3)]
    full = ([f"full.{n}" for n in range(4)], latent(512 // shard.size))
    return described(config_of(*groups, full, num_blocks=NUM_BLOCKS), model, shard)


def described(config: KVCacheConfig, model: str, shard: Shard) -> Memory:
    found = count_equal_ranks(config, num_ranks=shard.size, kv_head_counts={1})
    layout, layers = describe(config, shared_caches(config), Rank(model, shard, {1}, found.in_attention), packing="p")
    return Memory(layout, layers, block_map(config).groups)


def shared_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Return caches in which, as in vLLM, the n-th layers of all groups share a tensor and states are padded."""
    page = max(group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups)
    num_layers = len(config.kv_cache_groups[0].layer_names)
    raw = [torch.zeros(NUM_BLOCKS, page, dtype=torch.int8) for _ in range(num_layers)]
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


def num_prefix_slots(agent: AgentProcess, tier: str) -> int:
    return int(get_json(f"{agent.status_url}/status")[tier]["prefix"])


def await_stored(agent: AgentProcess) -> None:
    """Wait until all that an engine stores is in memory and on the SSD."""
    wait_until(lambda: not get_json(f"{agent.status_url}/status")["prefix_store"], what="the blocks in memory")
    wait_until(lambda: num_prefix_slots(agent, "pool") == num_prefix_slots(agent, "ssd"), what="the blocks on the SSD")


def test_eight_ranks_store_as_many_bytes_as_one_in_memory_and_on_ssd(tmp_path: Path) -> None:
    """Eight ranks keep the pieces of a block in eight slots, which are as long together as the one of the whole block."""
    prompt = prompt_of(1, 1024)
    stored = []
    for size in (1, 8):
        directory = tmp_path / str(size)
        directory.mkdir()
        with Children(directory) as children:
            stack = Stack(children, directory)
            ssd = {"ssd_directory": str(directory / "ssd"), "ssd_bytes": "200MiB"}
            agent = stack.start_agent("west", pool_bytes="200MiB", **ssd)
            stack.await_agent(agent)
            first, *others = (like_kimi_linear("kimi", Shard(rank, size)) for rank in range(size))
            engine = FakeEngine(agent.socket, first, others=others, reuse=True, reuse_min_tokens=16)
            leave_prefix(engine, prompt)
            await_stored(agent)
            stored.append([num_prefix_slots(agent, tier) * shape_of(first.layout).stride_bytes for tier in TIERS])
            engine.close()
            # The next life of the agent has nothing in memory.
            agent = replace(agent, child=children.kill_and_restart(agent.child))
            stack.await_agent(agent)
            engine = FakeEngine(agent.socket, first, others=others, reuse=True, reuse_min_tokens=16)
            assert num_prefix_slots(agent, "pool") == 0
            reuse_prefix(engine, prompt)
            engine.close()
    assert stored[1] == stored[0]

"""PrfaasConnector against vLLM's interfaces: methods, cache specs, extra hash keys, registry."""

import inspect
import pickle  # noqa: TID251 - vLLM itself sends metadata in this form.
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import qwen_gdn_attention_core
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import linear_attention
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_mixer2
from vllm.model_executor.layers.mamba.short_conv import short_conv
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.config_checks import check_salt
from prfaas.connector.metadata import Load, Step
from prfaas.connector.vllm import health
from prfaas.connector.vllm.connector import PrfaasConnector, StepMetadata
from prfaas.connector.vllm.hooks import on_layer_end
from prfaas.connector.vllm.kv_layout import (
    PLAIN_BACKENDS,
    Rank,
    block_map,
    count_equal_ranks,
    describe,
    has_one_attention,
    kv_head_counts,
    packing,
)
from prfaas.connector.vllm.request import token_chain
from prfaas.errors import LayoutError
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import siblings
from prfaas.kv.parts import piece_of
from prfaas.kv.repack import obstacle
from prfaas.types import Shard
from tests.support.paused_process import paused
from tests.support.vllm_caches import KDA, LIGHTNING, attention, caches_of, config_of, latent, state
from tools.tiny_models import make_model

pytestmark = pytest.mark.vllm
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=100)
WINDOW_OF_ONE = replace(WINDOW, num_kv_heads=1)


@pytest.mark.parametrize(
    ("linear", "count", "full"), [(KDA, 3, latent()), (LIGHTNING, 7, latent()), (KDA, 3, attention())]
)
def test_hybrid_models_are_described_group_by_group(linear: MambaSpec, count: int, full: Any) -> None:
    groups = [([f"linear.{index}"], linear) for index in range(count)]
    config = config_of(*groups, (["full.0", "full.1"], full))
    layout, layers = describe(config, caches_of(config), Rank("m", Shard(), {2}), packing="p")
    assert [group.kind for group in layout.groups] == ["linear_state"] * count + ["full_attention"]
    assert layout.groups[0].block_bytes == linear.state_content_size_bytes
    assert layout.groups[-1].block_bytes == 2 * full.unpadded_page_size_bytes
    assert list(layers) == [*(f"linear.{index}" for index in range(count)), "full.0", "full.1"]
    assert block_map(config).groups[0] == KVGroup("linear_state", 4096)
    assert type(layout).from_dict(layout.to_dict()) == layout


def test_windows_and_kept_states_are_recognized() -> None:
    checkpoints = state(MambaAttentionBackendEnum.MAMBA2, (3, 96), (4, 32), mamba_cache_mode="align")
    groups = block_map(config_of((["w"], WINDOW), (["s"], checkpoints))).groups
    assert groups == (KVGroup("sliding_window", 32, window_tokens=100), KVGroup("linear_state", 4096, kept_states=True))


@pytest.mark.parametrize(
    ("groups", "allowed"),
    [
        ([KDA, KDA, attention()], True),
        ([KDA, latent()], True),
        ([attention(), attention()], False),  # The local prefix is that of all groups.
        ([KDA], False),
        ([KDA, attention(), WINDOW], False),  # A window may end before the attention that vLLM counts.
        ([KDA, attention(), latent()], False),  # So may attention of another kind.
    ],
)
def test_vllm_may_count_attention_beyond_states_if_a_load_completes_the_rest(
    groups: list[KVCacheSpec], allowed: bool
) -> None:
    assert has_one_attention(config_of(*(([str(name)], spec) for name, spec in enumerate(groups)))) == allowed


def test_groups_without_transfer_are_left_out() -> None:
    config = config_of((["a"], attention()), (["b"], attention()))
    config.kv_cache_groups[0].enable_kv_transfer = False
    layout, _ = describe(config, caches_of(config), Rank("m", Shard(), {2}), packing="p")
    assert [layer.name for layer in layout.groups[0].layers] == ["b"]


def test_layers_with_a_shared_cache_travel_once() -> None:
    config = config_of((["a", "b"], attention()))
    caches = caches_of(config)
    caches["b"] = caches["a"]
    layout, layers = describe(config, caches, Rank("m", Shard(), {2}), packing="p")
    assert list(layers) == ["a"] and len(layout.groups[0].layers) == 1


def test_a_group_with_different_page_sizes_is_described_layer_by_layer() -> None:
    specs = {"narrow": attention(num_kv_heads=1), "wide": attention(num_kv_heads=4)}
    config = config_of((list(specs), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)))
    layout, _ = describe(config, caches_of(config), Rank("m", Shard(), {4}), packing="p")
    narrow, wide = layout.groups[0].layers
    assert wide.payload_bytes == 4 * narrow.payload_bytes and wide.offset_bytes == narrow.payload_bytes


@pytest.mark.parametrize(
    ("specs", "num_ranks", "heads", "replicas"),
    [
        ([latent()], 8, {1}, (8, 8)),
        ([latent(), latent(64)], 8, {128}, (8, 8)),  # With the keys of an indexer.
        ([attention(num_kv_heads=1)], 8, {2}, (4, 4)),
        ([attention(num_kv_heads=2)], 4, {8}, (1, 1)),
        ([attention(num_kv_heads=1), WINDOW_OF_ONE], 8, {2}, (4, 4)),
        ([attention(num_kv_heads=1), WINDOW_OF_ONE], 8, {4, 8}, (1, 1)),  # Each may be of either number (MiMo V2).
        ([attention(num_kv_heads=1)], 4, {2, 8}, (2, 2)),  # With eight heads, each rank had two.
        ([KDA, latent()], 8, {1}, (1, 8)),  # Each rank has its own part of the states.
        ([KDA, attention(num_kv_heads=1)], 8, {2}, (1, 4)),
        ([replace(KDA, tp_replicated=True), latent()], 8, {1}, (8, 8)),
        ([attention()], 1, {2}, (1, 1)),
    ],
)
def test_ranks_with_equal_kv_are_replicas(
    specs: list[KVCacheSpec], num_ranks: int, heads: set[int], replicas: tuple[int, int]
) -> None:
    config = config_of(*(([str(name)], spec) for name, spec in enumerate(specs)))
    assert count_equal_ranks(config, num_ranks=num_ranks, kv_head_counts=heads) == replicas


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"id2label": {0: "no"}}, {4}),
        ({"swa_num_key_value_heads": 8, "linear_num_value_heads": 32}, {4, 8}),  # MiMo V2
        ({"other": {"num_attention_groups": 8}, "sink_kv_heads": None}, {4, 8}),  # Step 3.5
        ({"num_kv_heads": [2, 4, 16]}, {2, 4, 16}),
    ],
)
def test_all_numbers_of_kv_heads_in_a_configuration_are_found(settings: dict[str, Any], expected: set[int]) -> None:
    text = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": 4, "num_heads": 64} | settings)
    assert kv_head_counts(SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: 4)) == expected


def test_a_layer_of_which_the_heads_are_not_known_is_exchanged_between_equal_sizes_alone() -> None:
    """At size 8, each of windows with 8 heads and full attention with 4 has one head on a rank."""
    whole, eight = (
        [
            describe(config, caches_of(config), Rank("m", Shard(rank, size), {4, 8}), packing="p")[0]
            for rank in range(size)
        ]
        for size, config in (
            (1, config_of((["w"], attention(num_kv_heads=8)), (["f"], attention(num_kv_heads=4)))),
            (8, config_of((["w"], attention(num_kv_heads=1)), (["f"], attention(num_kv_heads=1)))),
        )
    )
    assert "is not known" in str(obstacle(eight[0], whole[0])) and "is not known" in str(obstacle(whole[0], eight[5]))
    assert [layout.groups[0].layers[0].first_head for layout in eight] == [0] * 8
    two = config_of((["w"], attention(num_kv_heads=4)), (["f"], attention(num_kv_heads=2)))
    layouts = [describe(two, caches_of(two), Rank("m", Shard(rank, 2), {4, 8}), packing="p")[0] for rank in range(2)]
    firsts = [[group.layers[0].first_head for group in layout.groups] for layout in layouts]
    assert firsts == [[0, 0], [4, 2]] and obstacle(layouts[1], whole[0]) is None


def test_equal_attention_beside_states_is_divided_among_its_ranks() -> None:
    config = config_of((["s"], KDA), (["a"], attention(num_kv_heads=1)))
    caches = caches_of(config)
    layouts = [describe(config, caches, Rank("m", Shard(rank, 8), {2}, 4), packing="p")[0] for rank in range(8)]
    pieces = [layout.groups[1].layers[0] for layout in layouts]
    assert [piece_of(layer) for layer in pieces] == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2
    assert [layer.first_head for layer in pieces] == [0] * 4 + [1] * 4
    assert sum(layer.payload_bytes for layer in pieces) == 2 * caches["a"][0].numel() * caches["a"].element_size()
    assert [layout.shard.rank for layout in siblings(layouts[6])] == [6, 7, 4, 5]
    assert set(siblings(layouts[6])) == set(layouts[4:])


@pytest.mark.parametrize(
    ("rank", "size", "total", "local", "heads"),
    [(0, 1, 8, 8, (0, 8)), (1, 2, 8, 4, (4, 4)), (3, 4, 2, 1, (1, 1)), (1, 4, 2, 1, (0, 1)), (7, 8, 1, 1, (0, 1))],
)
def test_a_layout_names_the_heads_of_its_rank(
    rank: int, size: int, total: int, local: int, heads: tuple[int, int]
) -> None:
    config = config_of((["a"], attention(num_kv_heads=local)))
    layout, _ = describe(config, caches_of(config), Rank("m", Shard(rank, size), {total}), packing="p")
    assert (layout.groups[0].layers[0].first_head, layout.groups[0].layers[0].num_heads) == heads


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16), "CrossAttentionSpec"),
        (attention(block_size=24), "blocks of 24 tokens"),
    ],
)
def test_unknown_kinds_stop_the_start(spec: KVCacheSpec, name: str) -> None:
    with pytest.raises(LayoutError, match=name):
        block_map(config_of((["a"], attention()), (["b"], spec)))


def test_a_layer_without_a_cache_is_named() -> None:
    config = config_of((["a", "b"], attention()))
    caches = caches_of(config)
    del caches["b"]
    with pytest.raises(LayoutError, match="layer b has no registered KV cache"):
        describe(config, caches, Rank("m", Shard(), {2}), packing="p")


def _packing(backend: str, *, device: str = "cuda", cache_dtype: str = "auto", assumes_plain: bool = False) -> str:
    """Return the packing of a layer with one of vLLM's backends."""
    layer = SimpleNamespace(get_attn_backend=AttentionBackendEnum[backend].get_class)
    where = torch.device(device)
    return packing({"a": layer}, ["a"], cache_dtype=cache_dtype, device=where, assumes_plain=assumes_plain)


@pytest.mark.parametrize(
    ("backend", "options", "is_equal"),
    [
        ("TRITON_ATTN", {}, True),
        ("TRITON_FLASH_ATTN", {}, True),  # Gemma 3 with images takes it on Hopper.
        ("ROCM_AITER_FA", {}, False),  # It calls itself FLASH_ATTN, and may shuffle its blocks.
        ("FLEX_ATTENTION", {"cache_dtype": "fp8"}, True),
        ("B12X", {}, False),  # All keys of a block come before its values.
        ("B12X", {"assumes_plain": True}, True),
        ("TRITON_ATTN", {"cache_dtype": "int4_per_token_head"}, False),
        ("TRITON_ATTN", {"cache_dtype": "int4_per_token_head", "assumes_plain": True}, False),
        ("CPU_ATTN", {"device": "cpu", "assumes_plain": True}, False),
    ],
)
def test_attention_backends_are_compared_by_the_order_of_their_bytes(
    backend: str, options: dict[str, Any], is_equal: bool
) -> None:
    assert (_packing(backend, **options) == _packing("FLASH_ATTN", **options)) == is_equal


def test_backends_that_are_taken_for_plain_do_not_change_the_spec_of_a_layer() -> None:
    needs_cuda = {"FLASHINFER", "TRITON_FLASHINFER", "FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA"}
    for backend in (AttentionBackendEnum[name].get_class() for name in PLAIN_BACKENDS - needs_cuda):
        assert backend.customize_spec(attention()) == attention()


# The class


def test_every_method_has_the_parameters_of_vllms_interface() -> None:
    for name, method in inspect.getmembers(PrfaasConnector, inspect.isfunction):
        base = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or base is None:
            continue
        assert _parameters(method) == _parameters(base), name


def _parameters(method: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(method).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


@pytest.mark.parametrize(
    ("layerwise", "mode"),
    [("auto", CUDAGraphMode.FULL_AND_PIECEWISE), ("off", CUDAGraphMode.FULL), ("on", CUDAGraphMode.PIECEWISE)],
)
def test_full_cuda_graphs_stay_unless_the_operator_insists_on_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layerwise: str, mode: CUDAGraphMode
) -> None:
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    monkeypatch.setattr(type(current_platform), "check_and_update_config", lambda self, config: None)
    transfer = KVTransferConfig(
        kv_connector="PrfaasConnector",
        kv_connector_module_path="prfaas.connector.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"agent_socket": "a.sock", "layerwise": layerwise},
    )
    wanted = CUDAGraphMode.FULL_AND_PIECEWISE if layerwise == "on" else mode
    model = ModelConfig(str(make_model("llama", tmp_path)), skip_tokenizer_init=True, dtype="float32")
    config = VllmConfig(
        model_config=model,
        kv_transfer_config=transfer,
        compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=wanted),
    )
    assert config.compilation_config.cudagraph_mode == mode


def recurrent(kind: MambaAttentionBackendEnum, method: str) -> Any:
    """Return a stand-in for a layer of vLLM, which records its calls in `called`."""
    called: list[str] = []
    fields = {"mamba_type": kind, "called": called, method: lambda layer, **named: called.append(method)}
    return type("Layer", (), fields)()


@pytest.mark.parametrize(
    ("kind", "operator", "num_tensors", "method"),
    [
        (MambaAttentionBackendEnum.MAMBA2, mamba_mixer2, 2, "conv_ssm_forward"),
        (MambaAttentionBackendEnum.GDN_ATTN, qwen_gdn_attention_core, 4, "_forward_core"),
        (MambaAttentionBackendEnum.LINEAR, linear_attention, 3, "_forward"),
        (MambaAttentionBackendEnum.SHORT_CONV, short_conv, 2, "forward_native"),
    ],
)
def test_the_operator_of_a_recurrent_layer_reports_its_end_in_a_compiled_graph(
    kind: MambaAttentionBackendEnum, operator: Callable[..., None], num_tensors: int, method: str
) -> None:
    layer = recurrent(kind, method)

    def run() -> list[str]:
        with override_forward_context(SimpleNamespace(no_compile_layers={"layer": layer})):
            operator(*(torch.zeros(1) for _ in range(num_tensors)), "layer")
        return list(layer.called)

    on_layer_end(layer, lambda: layer.called.append("ended"), is_compiled=True)
    assert run() == [method, "ended"]


def test_step_metadata_can_be_pickled() -> None:
    metadata = StepMetadata(Step(loads=(Load("r", ()),), ends=(3,)))
    assert pickle.loads(pickle.dumps(metadata)).step == metadata.step  # noqa: S301  as vLLM's executors do


# Hashes


def request(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "prompt_token_ids": list(range(100)),
        "all_token_ids": list(range(100)),
        "num_prompt_tokens": 100,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "_prompt_embeds_per_block_hashes": {},
    }
    return SimpleNamespace(**fields | changes)


def hash_of(request_: Any, tenant: str = "") -> bytes | None:
    chain = token_chain(request_, request_.num_prompt_tokens, model="m", tenant=tenant)
    return chain.at(100) if chain is not None else None


def test_a_plain_prompt_has_the_routers_hash() -> None:
    assert hash_of(request()) == HashChain(root_hash("m", b""), range(100)).at(100)
    assert hash_of(request(), "t") == HashChain(root_hash("m", b"t"), range(100)).at(100)


def test_a_salt_equal_to_the_tenant_is_hashed_once() -> None:
    assert hash_of(request(cache_salt="t"), "t") == hash_of(request(), "t")
    assert hash_of(request(cache_salt="s"), "t") not in (hash_of(request(), "t"), hash_of(request(), "s"))


@pytest.mark.parametrize("name", ["acme", "é ü", "x" * 128, "x" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_vllm_accepts_the_salts_that_the_router_accepts(name: str) -> None:
    assert _is_taken(check_salt, name) == _is_taken(validate_cache_salt, name)


def _is_taken(check: Callable[[str], None], name: str) -> bool:
    try:
        check(name)
    except (ValueError, VLLMValidationError):
        return False
    return True


def test_every_extra_changes_the_hash() -> None:
    lora = SimpleNamespace(lora_name="l", lora_path="/l")
    image = SimpleNamespace(identifier="abc", mm_position=SimpleNamespace(offset=40, length=20))
    moved = SimpleNamespace(identifier="abc", mm_position=SimpleNamespace(offset=41, length=20))
    variants = [
        request(),
        request(cache_salt="s"),
        request(lora_request=lora),
        request(mm_features=[image]),
        request(mm_features=[moved]),
        request(prompt_embeds=torch.zeros(100, 4)),
        request(prompt_embeds=torch.ones(100, 4)),
    ]
    assert len({hash_of(variant) for variant in variants}) == len(variants)


def test_a_prompt_without_token_ids_makes_no_claim() -> None:
    assert hash_of(request(prompt_token_ids=None)) is None


class _Engine(AsyncLLM):  # type: ignore[misc]
    """Engine of an API server with another process as its EngineCore."""

    def __init__(self, core: subprocess.Popen[bytes]) -> None:
        resources = BackgroundResources(SimpleNamespace(), engine_manager=SimpleNamespace(processes=[core]))
        self.engine_core = SimpleNamespace(resources=resources, is_scheduler_paused_async=self._answer)
        self.output_handler = None
        self.num_answers = 0

    async def _answer(self) -> bool:
        self.num_answers += 1
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        pass


async def test_the_health_of_an_api_server_waits_for_its_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(AsyncLLM, "check_health", AsyncLLM.check_health)  # Restored in the end.
    for _ in range(2):
        health.watch_engine_core()
    with subprocess.Popen(["sleep", "600"]) as core:  # noqa: ASYNC220 - starts at once
        engine = _Engine(core)
        await engine.check_health()
        with paused(core.pid), pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.check_health()
        core.kill()
    assert engine.num_answers > 0

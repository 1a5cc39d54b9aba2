"""Every field of vLLM's cache specs and options is judged, and values under which blocks would be wrong are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
import vllm.config
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, KVQuantMode, SlidingWindowSpec

from prfaas.connector.vllm.checks import JUDGED, WITH_KV, WITHOUT_KV, check_engine, check_fields
from prfaas.connector.vllm.kv_layout import JUDGED_CACHES, Rank, check_cache, describe, without_drafts
from prfaas.errors import ConfigError
from prfaas.kv.layout import Layout
from prfaas.kv.repack import obstacle
from prfaas.types import Shard
from tests.support.vllm_caches import attention, caches_of, config_of, latent, state

pytestmark = pytest.mark.vllm
# Recorded from an installed vLLM 0.33: {class: fields}.
RECORDED: Mapping[str, list[str]] = json.loads((Path(__file__).parents[2] / "data/vllm-0.33-fields.json").read_text())
ALL_JUDGED = JUDGED | JUDGED_CACHES


def installed_fields(name: str) -> list[str]:
    kind = getattr(kv_cache_interface, name, None) or getattr(vllm.config, name)
    return [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("name", ALL_JUDGED)
def test_every_field_of_vllm_is_judged(name: str) -> None:
    known = ALL_JUDGED[name].keys()
    assert set(installed_fields(name)) - known == set()
    assert set(RECORDED[name]) - known == set()
    assert known - {*installed_fields(name), *RECORDED[name]} == set(), "no release has these fields"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """A class of vLLM as a later release may have it."""

    backend: str = "x"
    swaps_halves: bool = False


def test_a_field_that_nobody_has_judged_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"AttentionConfig\.swaps_halves"):
        check_fields(AttentionConfig(), JUDGED["AttentionConfig"], accepts_untested=False)
    check_fields(AttentionConfig(), JUDGED["AttentionConfig"], accepts_untested=True)


@pytest.mark.parametrize(("version", "is_accepted"), [("0.32.1", True), ("0.33.0rc2", True), ("0.34.0", False)])
def test_only_tested_releases_start_unless_the_operator_accepts_others(
    monkeypatch: pytest.MonkeyPatch, version: str, is_accepted: bool
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    check_engine(VllmConfig(), accepts_untested=True)
    if is_accepted:
        check_engine(VllmConfig(), accepts_untested=False)
    else:
        with pytest.raises(ConfigError, match=r"0\.34\.0.*accept_untested_vllm"):
            check_engine(VllmConfig(), accepts_untested=False)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "nnodes", 2),
        ("parallel_config", "distributed_executor_backend", "ray"),
        ("parallel_config", "data_parallel_backend", "ray"),
        ("parallel_config", "enable_dbo", True),
        ("parallel_config", "ubatch_size", 2),
        ("cache_config", "use_replayssm", True),
        ("cache_config", "use_kda_recoverssm", True),
        ("cache_config", "mamba_cache_mode", "all"),
        ("attention_config", "use_non_causal", True),
        ("attention_config", "hisparse_config", object()),
        ("speculative_config", "method", "dflash"),
        ("speculative_config", "method", "dspark"),
        ("speculative_config", "method", "extract_hidden_states"),
        ("speculative_config", "method", "custom_class"),
        ("", "diffusion_config", object()),
        ("", "additional_config", {"layout": "own"}),
    ],
)
@pytest.mark.parametrize("accepts_untested", [False, True])
def test_options_under_which_blocks_would_be_wrong_are_refused_by_name(
    part: str, name: str, value: Any, accepts_untested: bool
) -> None:
    config = _speculating("ngram")
    object.__setattr__(getattr(config, part) if part else config, name, value)
    with pytest.raises(ConfigError, match=f"does not support {name}="):
        check_engine(config, accepts_untested=accepts_untested)


def _speculating(method: str) -> VllmConfig:
    config, drafts = VllmConfig(), SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
    object.__setattr__(drafts, "method", method)
    object.__setattr__(config, "speculative_config", drafts)
    return config


@pytest.mark.parametrize("method", [*WITHOUT_KV, *WITH_KV])
def test_speculation_that_leaves_right_blocks_is_accepted(method: str) -> None:
    check_engine(_speculating(method), accepts_untested=False)


def test_the_prefill_kernel_of_gated_delta_nets_may_be_chosen() -> None:
    check_engine(VllmConfig(additional_config={"gdn_prefill_backend": "triton"}), accepts_untested=False)


def test_layers_of_a_draft_model_are_left_out_by_name_or_number() -> None:
    """The names are those of EAGLE, of MTP, and of a draft model of its own in vLLM 0.32."""
    last = [f"model.layers.{number}.self_attn.attn" for number in (2, 3)]
    drafts = ["model.layers.4.self_attn.attn", "mtp.layers.0.self_attn.attn", "draft_model.layers.3.self_attn.attn"]
    config = config_of(
        (["model.layers.0.linear_attn"], attention()), ([*last, *drafts], attention()), (drafts, attention())
    )
    kept = without_drafts(config, 4)
    assert [group.layer_names for group in kept.kv_cache_groups] == [["model.layers.0.linear_attn"], last, []]
    assert kept.transfer_group_ids == (0, 1)
    assert config.transfer_group_ids == (0, 1, 2)


WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=100, extra_retained_tokens=3
)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (attention(non_causal=True), "non_causal"),
        (attention(tokens_per_state=4), "tokens_per_state"),
        (WINDOW, "extra_retained_tokens"),
        (state(MambaAttentionBackendEnum.MAMBA2, (3, 96), (4, 32), mamba_cache_mode="all"), "mamba_cache_mode"),
    ],
)
def test_groups_whose_blocks_would_be_wrong_are_refused_by_name(spec: KVCacheSpec, name: str) -> None:
    config, without = (config_of((["a"], attention()), (["b"], spec)) for _ in range(2))
    with pytest.raises(ConfigError, match=f"does not support {name}="):
        check_cache(config, accepts_untested=True)
    without.kv_cache_groups[1].enable_kv_transfer = False
    check_cache(without, accepts_untested=False)


def test_the_groups_of_common_models_are_accepted() -> None:
    speculating = {"mamba_cache_mode": "align", "num_speculative_blocks": 2}
    checkpoints = state(MambaAttentionBackendEnum.MAMBA2, (3, 96), (4, 32), **speculating)
    check_cache(config_of((["a"], attention()), (["b"], latent()), (["c"], checkpoints)), accepts_untested=False)


def _layout(spec: KVCacheSpec, shard: Shard) -> Layout:
    config = config_of((["a"], spec))
    return describe(config, caches_of(config), Rank("m", shard, {4}), packing="p")[0]


@pytest.mark.parametrize(
    "packed",
    [
        # As FlashInfer stores NVFP4: [keys | scales of keys | values | scales of values].
        {"kv_quant_mode": KVQuantMode.NVFP4, "num_head_slots": 4, "state_content_bytes": 10, "dtype": torch.uint8},
        {"kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD, "dtype": torch.uint8},
        {"num_head_slots": 2, "state_content_bytes": 64},  # As B12X: [keys | values], here of two heads.
    ],
)
def test_blocks_that_no_rank_can_divide_by_heads_travel_between_equal_sizes_only(packed: dict[str, Any]) -> None:
    spec = attention(**packed)
    whole, half = _layout(spec, Shard(0, 1)), _layout(spec, Shard(0, 2))
    assert "equal tensor-parallel sizes" in str(obstacle(half, whole))
    assert Layout.from_dict(whole.to_dict()) == whole
    plain = attention(), attention(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.float8_e4m3fn)
    assert [obstacle(_layout(spec, Shard(0, 2)), _layout(spec, Shard(0, 1))) for spec in plain] == [None, None]

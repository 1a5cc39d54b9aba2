"""Judgement of every option of vLLM that can change the contents of a block: accepted, or refused by name.

A field without an entry stops the start, so that a new feature of vLLM never changes blocks unnoticed. `kv_layout` judges
the fields of KV cache specs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import vllm

from prfaas import logs
from prfaas.errors import ConfigError

SUPPORTED_RELEASES = ("0.32", "0.33")
# Methods of speculative decoding, by whether their drafts have KV of their own. The engine verifies each draft, so wrong KV
# of a draft layer costs accepted drafts, never a wrong token.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
_log = logs.get("connector.checks")


@dataclasses.dataclass(frozen=True)
class Limit:
    """Values of a field that are accepted, and the reason why others are not."""

    accepts: Callable[[Any], bool]
    reason: str


Judgement = Mapping[str, Limit | None]  # By field; None accepts every value.


def accept(names: str) -> dict[str, Limit | None]:
    """Return a judgement that accepts every value of these fields."""
    return dict.fromkeys(names.split())


def only(*values: Any, reason: str) -> Limit:
    """Return a limit to these values."""
    return Limit(lambda value: value in values, reason)


_ONE_RANK = "blocks of several such ranks are not joined"
JUDGED: dict[str, Judgement] = {
    # The operator's name for the weights covers model, revision, quantization and overrides.
    "VllmConfig": accept("""cache_config parallel_config attention_config mamba_config kv_transfer_config
        scheduler_config speculative_config model_config quant_config lora_config load_config weight_transfer_config
        engram_config device_config offload_config aux_output_config kernel_config compilation_config optimization_level
        watermark_config structured_outputs_config reasoning_config ec_transfer_config ec_manager_config
        observability_config logging_config profiler_config kv_events_config watchdog_config instance_id
        performance_mode shutdown_timeout""")
    | {
        "diffusion_config": only(None, reason="a block changes until the whole canvas is done"),
        "additional_config": Limit(  # Each kernel that this key selects writes the state that the one decode kernel reads.
            lambda value: not value or (isinstance(value, dict) and value.keys() == {"gdn_prefill_backend"}),
            "a platform may store blocks in its own way",
        ),
    },
    "CacheConfig": accept("""block_size user_specified_block_size kv_cache_layout prefix_match_unit
        gpu_memory_utilization cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype
        sliding_window is_attention_free num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo
        prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded mamba_block_size
        replayssm_buffer_len num_gpu_blocks num_cpu_blocks effective_attention_block_size kv_cache_size_tokens
        kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_sharing_fast_prefill swa_bounded_replay
        kv_cache_memory_bytes kv_offloading_size kv_offloading_backend _block_size_resolved
        simple_cpu_offload_num_blocks""")
    | {
        "mamba_cache_mode": only("none", "align", reason="the place of a state in the block table is not known"),
        "use_replayssm": only(False, reason="a block lacks the state of up to 15 tokens until vLLM writes it back"),
        "use_kda_recoverssm": only(False, reason="a block lacks the state of the latest tokens"),
        "enable_mamba_shared_prefix_checkpoint": only(False, reason="its states end within blocks"),
    },
    "ParallelConfig": accept("""tensor_parallel_size data_parallel_size data_parallel_size_local data_parallel_rank
        data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
        data_parallel_master_port data_parallel_external_lb data_parallel_hybrid_lb is_moe_model
        enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb
        eplb_config expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce
        enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size dbo_decode_token_threshold
        dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env
        placement_group worker_cls worker_extension_cls master_addr master_port node_rank
        numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
        cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list _coord_store_port
        dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
        _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count _api_process_rank
        enable_fault_tolerance fault_tolerance_config""")
    | {
        "pipeline_parallel_size": only(1, reason=_ONE_RANK),
        "prefill_context_parallel_size": only(1, reason=_ONE_RANK),
        "decode_context_parallel_size": only(1, reason=_ONE_RANK),
        "nnodes": only(1, reason="an engine reaches one agent"),
        "distributed_executor_backend": only(None, "mp", "uni", reason="its workers may run beside other agents"),
        "data_parallel_backend": only("mp", reason="its ranks may run beside other agents"),
        "enable_dbo": only(False, reason="a layer ends twice in a step"),
        "ubatch_size": only(0, 1, reason="a layer ends several times in a step"),
    },
    "AttentionConfig": accept("""backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
        flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend trtllm_ragged_backend
        use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows
        minimax_m3_indexer_cp sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m
        flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size""")
    | {
        "hisparse_config": only(None, reason="blocks on the host are not copied"),
        "use_non_causal": only(False, reason="the KV of a prompt depends on its last token, which does not travel"),
    },
    "SpeculativeConfig": accept("""enforce_eager num_speculative_tokens model draft_tensor_parallel_size
        tensor_parallel_size quantization moe_backend attention_backend kv_cache_dtype max_model_len revision
        code_revision index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop
        use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
        target_model_config target_parallel_config num_speculative_tokens_per_batch_size draft_model_config
        draft_parallel_config suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method
        synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method
        dspark_draft_topk disable_lookahead_block_hashes draft_lm_head_quantization xpress_topc fly_window_size
        fly_entropy_threshold fly_entropy_top_k""")
    | {"method": only(*WITHOUT_KV, *WITH_KV, reason="the contents of its blocks are not known")},
    "MambaConfig": accept("backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"),
}


def check_engine(config: Any, *, accepts_untested: bool) -> None:
    """Refuse a release of vLLM that was not tested, and options under which blocks would be wrong.

    `config` is a VllmConfig. With `accepts_untested` unknown releases and fields only leave a warning.

    Raises:
        ConfigError: The message names the release, or class and field.
    """
    tested = ", ".join(SUPPORTED_RELEASES)
    if ".".join(str(vllm.__version__).split(".")[:2]) not in SUPPORTED_RELEASES:
        _refuse_unknown(f"vLLM {vllm.__version__} (tested: {tested})", accepts_untested=accepts_untested)
    parts = (config.cache_config, config.parallel_config, config.attention_config, config.mamba_config)
    for part in filter(None, (config, *parts, config.speculative_config)):
        check_fields(part, JUDGED[type(part).__name__], accepts_untested=accepts_untested)


def check_fields(part: Any, judgement: Judgement, *, accepts_untested: bool) -> None:
    """Compare the fields of one dataclass of vLLM with their judgement. Raises ConfigError for the first refused one."""
    name = type(part).__name__
    for field in dataclasses.fields(part):
        if field.name not in judgement:
            _refuse_unknown(f"{name}.{field.name}", accepts_untested=accepts_untested)
            continue
        limit, value = judgement[field.name], getattr(part, field.name)
        if limit is not None and not limit.accepts(value):
            raise ConfigError(f"PrfaasConnector does not support {field.name}={value} of {name}: {limit.reason}")


def _refuse_unknown(subject: str, *, accepts_untested: bool) -> None:
    if not accepts_untested:
        raise ConfigError(f"PrfaasConnector does not know {subject}; `accept_untested_vllm: true` starts all the same")
    _log.warning("vllm.untested", subject=subject)

"""Size of a model from its config.json: parameters, those that a token uses, and the work of attention."""

from dataclasses import dataclass

from prfaas.model.kv.layer_kinds import Config, layer_kinds


@dataclass(frozen=True)
class ModelSize:
    """Parameters in total and per token, and the flops of attention for each pair of a token and an earlier one.

    `window_pair_flops` applies to pairs within `window_tokens`. `weight_bytes` is the size of all weights.
    """

    total: float
    active: float
    pair_flops: float
    weight_bytes: float
    window_pair_flops: float = 0.0
    window_tokens: int = 0


def model_size(config: Config) -> ModelSize | None:
    """Return the size of a model, or None where the config has no widths of its feed-forward layers.

    A stated `parameters` ({"total": ..., "active": ...}) is taken as it is. Otherwise the count covers embeddings,
    attention or its linear form, and feed-forward layers; norms and biases are left out.
    """
    stated = config.get("parameters")
    if not stated and not (config.get("intermediate_size") or config.get("moe_intermediate_size")):
        return None
    total, active = (stated["total"], stated["active"]) if stated else _counted(config)
    kinds = layer_kinds(config)
    local = kinds.count("window")
    pair = 2.0 * config["num_attention_heads"] * _pair_width(config)
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    return ModelSize(
        total,
        active,
        pair * kinds.count("full"),
        total * _weight_bytes(config),
        pair * local,
        int(window) if local else 0,
    )


def _weight_bytes(config: Config) -> float:
    """Return the bytes of a parameter. Types of 4 bits have a scale of 8 bits for each 16 or 32 parameters."""
    quantization = config.get("quantization_config") or {}
    method = f"{quantization.get('quant_method', '')} {quantization.get('format', '')}"
    if "fp4" in method or "pack-quantized" in method:
        return 0.5625
    return 1.0 if "fp8" in method else 2.0


def _pair_width(config: Config) -> float:
    """Return the elements of a key and a value of one head, as prefill computes them."""
    if config.get("kv_lora_rank"):
        return float(config.get("qk_nope_head_dim", 128) + config["qk_rope_head_dim"] + config.get("v_head_dim", 128))
    key = head_dim(config)
    return float(key + (config.get("v_head_dim") or key))


def head_dim(config: Config) -> int:
    """Return the elements of a key of one head."""
    stated = config.get("head_dim") or config.get("attention_head_dim")
    return int(stated or config["hidden_size"] // config["num_attention_heads"])


def _counted(config: Config) -> tuple[float, float]:
    """Return the parameters in total and per token."""
    hidden, kinds = config["hidden_size"], layer_kinds(config)
    num_attention = kinds.count("full") + kinds.count("window")
    num_linear = num_attention if config.get("model_type") == "falcon_h1" else kinds.count("linear")
    mixers = num_attention * _attention_parameters(config) + num_linear * _linear_parameters(config)
    total = active = mixers + config.get("vocab_size", 0) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    for experts, used, width, shared in _feed_forward(config):
        matrices = 2 if config.get("model_type") == "nemotron_h" else 3
        inner = config.get("moe_latent_size") or config.get("routed_expert_hidden_size") or hidden
        total += matrices * (experts * width * inner + shared * hidden)
        active += matrices * (used * width * inner + shared * hidden)
    return total, active


def _attention_parameters(config: Config) -> float:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config.get("qk_nope_head_dim", 128), config.get("v_head_dim", 128)
        query = config.get("q_lora_rank")
        queries = (hidden + heads * (nope + rope)) * query if query else hidden * heads * (nope + rope)
        return float(queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)
    dim, kv_heads = head_dim(config), config.get("num_key_value_heads") or heads
    gated = 2 if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next" else 1
    return float(hidden * dim * (heads * (1 + gated) + 2 * kv_heads))


def _linear_parameters(config: Config) -> float:
    """Return the parameters of one layer with a state: inputs, gates and output."""
    hidden = config["hidden_size"]
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return float(hidden * (2 * keys + 3 * values))
    if "linear_attn_config" in config:
        inner = config["linear_attn_config"]["num_heads"] * config["linear_attn_config"]["head_dim"]
        return float(4 * hidden * inner)
    heads = config.get("mamba_num_heads") or config.get("mamba_n_heads")
    if heads:
        dim = config.get("mamba_head_dim") or config["mamba_d_head"]
        groups = config.get("n_groups") or config["mamba_n_groups"]
        state = config.get("ssm_state_size") or config["mamba_d_state"]
        return float(hidden * (3 * heads * dim + 2 * groups * state + heads))
    if "mamba_expand" in config:
        return float(3 * hidden * config["mamba_expand"] * hidden)
    if "conv_L_cache" in config:
        return float(4 * hidden * hidden)
    return float(5 * hidden * config["num_attention_heads"] * head_dim(config))


def _feed_forward(config: Config) -> list[tuple[int, int, int, int]]:
    """Return (experts, experts per token, width of an expert, width shared by all tokens) of each layer."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    per_token = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "experts_per_token")
    used = next((config[name] for name in per_token if config.get(name)), 0)
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    dense = config.get("intermediate_size_mlp") or config.get("intermediate_size") or width
    dense = max(dense) if isinstance(dense, list) else dense
    layers, kinds = [], layer_kinds(config)
    is_apart = "experts" in kinds or "dense" in kinds  # No layer has attention and a feed-forward part.
    for index, kind in enumerate(kinds):
        if is_apart and kind not in ("experts", "dense"):
            continue
        is_sparse = bool(experts) and kind != "dense" and _is_sparse(config, index)
        layers.append((experts, used, width, _shared_width(config, width)) if is_sparse else (1, 1, dense, 0))
        if config.get("enable_moe_block"):
            layers.append((1, 1, dense, 0))
    return layers


def _is_sparse(config: Config, index: int) -> bool:
    """Return whether a layer has experts."""
    if index < (config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0):
        return False
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[index])
    period = config.get("expert_layer_period") or config.get("interleave_moe_layer_step") or 1
    offset = config.get("expert_layer_offset", period - 1)
    return bool(index % period == offset)


def _shared_width(config: Config, width: int) -> int:
    stated = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    for name in stated:
        if config.get(name):
            return int(config[name])
    if str(config.get("model_type", "")).startswith("llama4"):
        return width
    count = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    return int(count * width)

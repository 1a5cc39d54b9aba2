"""KV geometry of a model from its Hugging Face config.json. Unknown kinds of attention are refused by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.kv.geometry import Geometry, GroupBytes
from prfaas.model.kv.layer_kinds import Config, layer_kinds
from prfaas.model.kv.parameters import head_dim, model_size

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
# An indexer layer keeps keys in 8 bits, and one fp32 scale for each 128 elements (DeepSeek-V3.2).
_INDEXER_BLOCK = 128
_INDEXER_SCALE_BYTES = 4
# Engines keep the short convolution in bf16, whatever the type of the state.
_SHORT_CONVOLUTION_BYTES = 2


def text_config(config: Config) -> dict[str, Any]:
    """Return the fields of the language model, with the defaults of its type where published files leave them out."""
    text = {**config, **config.get("text_config", {})}
    return {**_DEFAULTS.get(text.get("model_type", ""), {}), **text}


def geometry(
    config: Config, *, name: str, source: str, kv_dtype: str = "auto", inferred: tuple[str, ...] = ()
) -> Geometry:
    """Return the geometry that `config` describes; `kv_dtype` "auto" keeps the model's own type.

    Raises:
        ConfigError: a layer kind or type is unknown, or a field is missing.
    """
    text = text_config(config)
    model_type = text.get("model_type", "")
    if model_type not in _ATTENTION_ONLY and model_type not in _LINEAR:
        raise ConfigError(f"{name}: attention of model type {model_type!r} is not known; it is not guessed")
    element = _element_bytes(text, kv_dtype)
    if model_type.startswith("llama4"):
        inferred = (*inferred, f"chunked attention of {name}, counted as a window")
    try:
        groups = _groups(text, element)
    except KeyError as missing:
        raise ConfigError(f"{name}: model type {model_type!r}: config.json has no {missing.args[0]!r}") from None
    return Geometry(name, groups, source, inferred, model_size(text))


def _groups(config: Config, element: int) -> tuple[GroupBytes, ...]:
    """Return a group for each kind of layer that keeps KV. The last layers of Gemma 3n use the KV of earlier ones."""
    kinds = layer_kinds(config, may_be_uniform=config["model_type"] not in _MIXED)
    kinds = kinds[: len(kinds) - (config.get("num_kv_shared_layers") or 0)]
    full, window = kinds.count("full"), kinds.count("window")
    # Each layer of Falcon-H1 has attention and Mamba-2 side by side.
    linear = full if config["model_type"] == "falcon_h1" else kinds.count("linear")
    groups = [_attention(config, full, element)] if full else []
    if full and config.get("index_head_dim"):
        indexers = config.get("indexer_types") or ["full"] * full
        groups.append(_indexer(config, indexers.count("full")))
    if window:
        groups.append(_window(config, window, element))
    if linear:
        read = _LINEAR.get(config["model_type"])
        if read is None:
            raise ConfigError(f"linear layers of model type {config['model_type']!r} are not known")
        groups.append(read(config, linear))
    return tuple(groups)


def _element_bytes(config: Config, kv_dtype: str) -> int:
    dtype = _own_dtype(config) if kv_dtype == "auto" else kv_dtype
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"KV type {dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _state_bytes(config: Config, *, default: str = "float32") -> int:
    """Return the bytes of an element of a state. `default` is what engines use if the config states nothing."""
    dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or default
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"state type {dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _own_dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _attention(config: Config, num_layers: int, element: int) -> GroupBytes:
    """Return full attention: a latent and a rotary key for all heads together, or a key and a value per head.

    Full layers of Gemma 4 have their own heads.
    """
    if config.get("kv_lora_rank"):
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return GroupBytes("mla", num_layers, bytes_per_token=num_layers * width * element)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads = config["num_global_key_value_heads"]
    key = config.get("global_head_dim") or head_dim(config)
    value = config.get("v_head_dim") or key
    return GroupBytes("full_attention", num_layers, bytes_per_token=num_layers * heads * (key + value) * element)


def _indexer(config: Config, num_layers: int) -> GroupBytes:
    """Return the keys with which sparse attention selects tokens."""
    width: int = config["index_head_dim"]
    scales = -(-width // _INDEXER_BLOCK) * _INDEXER_SCALE_BYTES
    return GroupBytes("indexer", num_layers, bytes_per_token=num_layers * (width + scales))


def _window(config: Config, num_layers: int, element: int) -> GroupBytes:
    """Return sliding-window layers, which have their own heads in MiMo-V2.

    A chunk of Llama 4 counts as a window of its length, which is the most that a request holds.
    """
    prefix = "swa_" if "swa_num_key_value_heads" in config else ""
    key = config.get(f"{prefix}head_dim") or head_dim(config)
    value = config.get(f"{prefix}v_head_dim") or key
    per_token = num_layers * config[f"{prefix}num_key_value_heads"] * (key + value) * element
    window = config.get("sliding_window") or config["attention_chunk_size"]
    return GroupBytes("sliding_window", num_layers, bytes_per_token=per_token, window_tokens=window)


def _linear_state(
    num_layers: int, *, elements: int, element_bytes: int, conv_channels: int = 0, conv_kernel: int = 1
) -> GroupBytes:
    """Return a recurrent state of `elements` numbers and the last conv_kernel − 1 inputs of its short convolution."""
    convolution = conv_channels * (conv_kernel - 1) * _SHORT_CONVOLUTION_BYTES
    return GroupBytes("linear_state", num_layers, state_bytes=num_layers * (elements * element_bytes + convolution))


def _kda(config: Config, num_layers: int) -> GroupBytes:
    """Return KDA of Kimi Linear: a matrix state per head and short convolutions over query, key and value."""
    linear = config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    return _linear_state(
        num_layers,
        elements=heads * dim * dim,
        element_bytes=_state_bytes(config),
        conv_channels=3 * heads * dim,
        conv_kernel=linear["short_conv_kernel_size"],
    )


def _gated_delta_net(config: Config, num_layers: int) -> GroupBytes:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return _linear_state(
        num_layers,
        elements=values * config["linear_key_head_dim"],
        element_bytes=_state_bytes(config, default=_own_dtype(config)),
        conv_channels=2 * keys + values,
        conv_kernel=config["linear_conv_kernel_dim"],
    )


def _mamba2(config: Config, num_layers: int) -> GroupBytes:
    """Return Mamba-2 layers: a state per head, a convolution over the inner width and each group's two projections."""
    heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
    dim = config.get("mamba_head_dim") or config.get("mamba_d_head")
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    inner = heads * dim if isinstance(dim, int) else inner
    state = config.get("ssm_state_size") or config["mamba_d_state"]
    groups = config.get("n_groups") or config["mamba_n_groups"]
    default = "float32" if config["model_type"] == "nemotron_h" else _own_dtype(config)
    return _linear_state(
        num_layers,
        elements=inner * state,
        element_bytes=_state_bytes(config, default=default),
        conv_channels=inner + 2 * groups * state,
        conv_kernel=config.get("conv_kernel") or config["mamba_d_conv"],
    )


def _mamba1(config: Config, num_layers: int) -> GroupBytes:
    inner = config["mamba_expand"] * config["hidden_size"]
    return _linear_state(
        num_layers,
        elements=inner * config["mamba_d_state"],
        element_bytes=_state_bytes(config, default=_own_dtype(config)),
        conv_channels=inner,
        conv_kernel=config["mamba_d_conv"],
    )


def _short_convolution(config: Config, num_layers: int) -> GroupBytes:
    """Return layers of LFM2 that keep the last inputs of a convolution and nothing else."""
    channels, kernel = config["hidden_size"], config["conv_L_cache"]
    return _linear_state(num_layers, elements=0, element_bytes=0, conv_channels=channels, conv_kernel=kernel)


def _lightning(config: Config, num_layers: int) -> GroupBytes:
    """Return lightning attention: a matrix state per head, no convolution."""
    heads = config.get("num_kv_heads_for_linear_attn", config["num_attention_heads"])
    if not heads or "kda_lower_bound" in config:
        raise ConfigError(f"KDA layers of model type {config['model_type']!r} are not known; they are not guessed")
    return _linear_state(num_layers, elements=heads * head_dim(config) ** 2, element_bytes=_state_bytes(config))


# Values that published files leave out, since the model's type implies them.
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6}
_GEMMA3N = _GEMMA3 | {"num_key_value_heads": 2, "sliding_window_pattern": 5, "num_kv_shared_layers": 15}
_LLAMA4 = {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "head_dim": 128}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"sliding_window_pattern": 6},
    "gemma4_text": {"sliding_window_pattern": 6},
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
})  # fmt: skip
# Types in neither table are refused.
_ATTENTION_ONLY = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "minimax_m2", "glm4", "glm4_moe", "olmo2",
    "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "ernie4_5", "ernie4_5_moe", "seed_oss", "granite", "granitemoe",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "mimo_v2_flash", *_DEFAULTS,
})  # fmt: skip
_LINEAR: Mapping[str, Callable[[Config, int], GroupBytes]] = MappingProxyType({
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta_net),
    **dict.fromkeys(("minimax_text_01", "minimax", "minimax_m1"), _lightning),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v2_5"), _lightning),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1"), _mamba2),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_convolution),
    "kimi_linear": _kda,
    "jamba": _mamba1,
})  # fmt: skip
_MIXED = frozenset({*_LINEAR, "mimo_v2_flash"}) - {"falcon_h1"}

"""KV geometry of a model from its Hugging Face config.json. Unknown kinds of attention are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.kv import layers
from prfaas.model.kv.geometry import Geometry, GroupBytes

Config = Mapping[str, Any]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}

# Models whose every layer is plain multi-head or grouped-query attention over the whole context.
_PLAIN = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "minimax_m2", "glm4_moe", "olmo2", "gpt_oss",
})  # fmt: skip


def geometry(
    config: Config, *, name: str, source: str, kv_dtype: str = "auto", inferred: tuple[str, ...] = ()
) -> Geometry:
    """Return the geometry that `config` describes; `kv_dtype` "auto" keeps the model's own type.

    Raises:
        ConfigError: a layer kind or type is unknown, or a field is missing.
    """
    text = {**config, **config.get("text_config", {})}
    model_type = text.get("model_type", "")
    element = _element_bytes(text, kv_dtype)
    for applies, read in _FAMILIES:
        if applies(text):
            try:
                return Geometry(
                    name, tuple(group for group in read(text, element) if group.num_layers), source, inferred
                )
            except KeyError as missing:
                raise ConfigError(
                    f"{name}: model type {model_type!r}: config.json has no {missing.args[0]!r}"
                ) from None
    raise ConfigError(f"{name}: attention of model type {model_type!r} is not known; it is not guessed")


def _element_bytes(config: Config, kv_dtype: str) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16" if kv_dtype == "auto" else kv_dtype
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"KV type {dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _state_bytes(config: Config) -> int:
    dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "float32"
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"state type {dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention(config: Config, num_layers: int, element: int) -> GroupBytes:
    """Return full attention, latent or per head as the model has it."""
    if config.get("kv_lora_rank"):
        return layers.latent_attention(
            num_layers, latent_dim=config["kv_lora_rank"], rope_dim=config["qk_rope_head_dim"], element_bytes=element
        )
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    key = _head_dim(config)
    value = config.get("v_head_dim") or key
    return layers.full_attention(num_layers, kv_heads=heads, key_dim=key, value_dim=value, element_bytes=element)


def _window(config: Config, num_layers: int, element: int, *, prefix: str = "") -> GroupBytes:
    """Return sliding-window layers; `prefix` names their own fields (MiMo-V2)."""
    key = config.get(f"{prefix}head_dim") or _head_dim(config)
    return layers.sliding_window(
        num_layers,
        kv_heads=config[f"{prefix}num_key_value_heads"],
        key_dim=key,
        value_dim=config.get(f"{prefix}v_head_dim") or key,
        element_bytes=element,
        window_tokens=config["sliding_window"],
    )


def _read_plain(config: Config, element: int) -> list[GroupBytes]:
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        if config["model_type"] != "mistral":
            raise ConfigError(
                f"sliding windows of model type {config['model_type']!r} without layer_types are not known"
            )
        return [_window(config, config["num_hidden_layers"], element)]
    return [_attention(config, config["num_hidden_layers"], element)]


def _read_latent(config: Config, element: int) -> list[GroupBytes]:
    """Read DeepSeek V2 to V3.2 and Kimi K2; V3.2 adds an indexer to each layer."""
    num_layers = config["num_hidden_layers"]
    groups = [_attention(config, num_layers, element)]
    if config.get("index_head_dim"):
        groups.append(layers.indexer(num_layers, key_dim=config["index_head_dim"]))
    return groups


def _read_kimi(config: Config, element: int) -> list[GroupBytes]:
    """Read Kimi Linear: KDA layers have a matrix state per head and short convolutions over query, key and value."""
    linear = config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    state = layers.linear_state(
        len(linear["kda_layers"]),
        elements=heads * dim * dim,
        element_bytes=_state_bytes(config),
        conv_channels=3 * heads * dim,
        conv_kernel=linear["short_conv_kernel_size"],
    )
    return [_attention(config, len(linear["full_attn_layers"]), element), state]


def _gated_delta_net(config: Config, num_layers: int) -> GroupBytes:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return layers.linear_state(
        num_layers,
        elements=values * config["linear_key_head_dim"],
        element_bytes=_state_bytes(config),
        conv_channels=2 * keys + values,
        conv_kernel=config["linear_conv_kernel_dim"],
    )


def _read_layer_types(config: Config, element: int) -> list[GroupBytes]:
    """Read models that name each layer's kind."""
    kinds = list(config["layer_types"])
    readers: dict[str, Callable[[int], GroupBytes]] = {
        "full_attention": lambda count: _attention(config, count, element),
        "attention": lambda count: _attention(config, count, element),
        "sliding_attention": lambda count: _window(config, count, element),
        "linear_attention": lambda count: _gated_delta_net(config, count),
    }
    unknown = sorted(set(kinds) - set(readers))
    if unknown:
        raise ConfigError(f"layer kind {unknown[0]!r} is not known; it is not guessed")
    return [read(kinds.count(kind)) for kind, read in readers.items() if kind in kinds]


def _read_mimo(config: Config, element: int) -> list[GroupBytes]:
    """Read MiMo-V2: 1 in the pattern is a sliding window, with its own fields for heads."""
    pattern = config["hybrid_layer_pattern"]
    return [_attention(config, pattern.count(0), element), _window(config, pattern.count(1), element, prefix="swa_")]


def _read_gemma3(config: Config, element: int) -> list[GroupBytes]:
    """Read Gemma 3 without layer_types: every sixth layer is full attention."""
    num_layers = config["num_hidden_layers"]
    num_full = num_layers // config.get("sliding_window_pattern", 6)
    return [_attention(config, num_full, element), _window(config, num_layers - num_full, element)]


_NEMOTRON_ATTENTION = {"*", "attention"}
_NEMOTRON_MAMBA = {"M", "mamba"}
_NEMOTRON_CACHELESS = {"E", "-", "moe", "mlp"}


def _mamba2(config: Config, num_layers: int) -> GroupBytes:
    """Return Mamba-2 layers: a state per head, a convolution over the inner width and each group's two projections."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    return layers.linear_state(
        num_layers,
        elements=inner * config["ssm_state_size"],
        element_bytes=_state_bytes(config),
        conv_channels=inner + 2 * config["n_groups"] * config["ssm_state_size"],
        conv_kernel=config["conv_kernel"],
    )


def _read_nemotron(config: Config, element: int) -> list[GroupBytes]:
    """Read Nemotron-H, which names each layer's kind by a letter or a word. Feed-forward layers hold no cache."""
    kinds = list(config.get("layers_block_type") or config["hybrid_override_pattern"])
    unknown = sorted(set(kinds) - _NEMOTRON_ATTENTION - _NEMOTRON_MAMBA - _NEMOTRON_CACHELESS)
    if unknown:
        raise ConfigError(f"layer kind {unknown[0]!r} of Nemotron-H is not known; it is not guessed")
    num_attention = sum(kind in _NEMOTRON_ATTENTION for kind in kinds)
    num_mamba = sum(kind in _NEMOTRON_MAMBA for kind in kinds)
    return [_attention(config, num_attention, element), _mamba2(config, num_mamba)]


def _lightning(config: Config, num_layers: int, heads: int) -> GroupBytes:
    """Return lightning attention: a matrix state per head, no convolution."""
    dim = _head_dim(config)
    return layers.linear_state(
        num_layers, elements=heads * dim * dim, element_bytes=_state_bytes(config), conv_channels=0, conv_kernel=0
    )


def _read_ring(config: Config, element: int) -> list[GroupBytes]:
    """Read Ring and Ling 2.5: in each group of layers the last is full attention, the rest lightning attention."""
    if not config["num_kv_heads_for_linear_attn"] or "kda_lower_bound" in config:
        raise ConfigError(f"KDA layers of model type {config['model_type']!r} are not known; they are not guessed")
    num_layers = config["num_hidden_layers"]
    num_full = num_layers // config["layer_group_size"]
    linear = _lightning(config, num_layers - num_full, config["num_kv_heads_for_linear_attn"])
    return [_attention(config, num_full, element), linear]


def _read_minimax_text(config: Config, element: int) -> list[GroupBytes]:
    """Read MiniMax-Text-01 and M1: 1 is full attention, 0 lightning attention."""
    kinds = config["attn_type_list"]
    linear = _lightning(config, kinds.count(0), config["num_attention_heads"])
    return [_attention(config, kinds.count(1), element), linear]


def _is(*model_types: str) -> Callable[[Config], bool]:
    return lambda config: config.get("model_type") in model_types


_LAYER_TYPES = ("gpt_oss", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# The first family that applies reads the config. Gemma 4 shares keys with values and Llama 4 attends in chunks, so both
# are refused.
_FAMILIES: tuple[tuple[Callable[[Config], bool], Callable[[Config, int], list[GroupBytes]]], ...] = (
    (_is("kimi_linear"), _read_kimi),
    (_is("mimo_v2_flash"), _read_mimo),
    (_is("nemotron_h"), _read_nemotron),
    (_is("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v2_5"), _read_ring),
    (_is("minimax_text_01", "minimax", "minimax_m1"), _read_minimax_text),
    (_is("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _read_latent),
    (lambda config: config.get("model_type") in _LAYER_TYPES and "layer_types" in config, _read_layer_types),
    (_is("gemma3", "gemma3_text"), _read_gemma3),
    (lambda config: config.get("model_type") in _PLAIN and "layer_types" not in config, _read_plain),
    (lambda config: config.get("model_type") in _PLAIN, _read_layer_types),
)

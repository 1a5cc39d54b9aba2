"""KV geometry of a model from its Hugging Face config.json. Unknown kinds of attention are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.kv import layers
from prfaas.model.kv.geometry import Geometry, GroupBytes
from prfaas.model.kv.parameters import head_dim, model_size

Config = Mapping[str, Any]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}

# Models with multi-head or grouped-query attention over the whole context, and windows only where layer_types says so.
_PLAIN = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "minimax_m2", "glm4", "glm4_moe", "olmo2",
    "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "ernie4_5", "ernie4_5_moe", "seed_oss", "granite", "granitemoe",
})  # fmt: skip


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
    read = _FAMILIES.get(model_type)
    if read is None:
        raise ConfigError(f"{name}: attention of model type {model_type!r} is not known; it is not guessed")
    element = _element_bytes(text, kv_dtype)
    if model_type.startswith("llama4"):
        inferred = (*inferred, f"chunked attention of {name}, counted as a window")
    try:
        groups = tuple(group for group in read(text, element) if group.num_layers)
    except KeyError as missing:
        raise ConfigError(f"{name}: model type {model_type!r}: config.json has no {missing.args[0]!r}") from None
    return Geometry(name, groups, source, inferred, model_size(text))


def _element_bytes(config: Config, kv_dtype: str) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16" if kv_dtype == "auto" else kv_dtype
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
    """Return full attention, latent or per head as the model has it."""
    if config.get("kv_lora_rank"):
        return layers.latent_attention(
            num_layers, latent_dim=config["kv_lora_rank"], rope_dim=config["qk_rope_head_dim"], element_bytes=element
        )
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    key = head_dim(config)
    value = config.get("v_head_dim") or key
    return layers.full_attention(num_layers, kv_heads=heads, key_dim=key, value_dim=value, element_bytes=element)


def _window(config: Config, num_layers: int, element: int, *, prefix: str = "") -> GroupBytes:
    """Return sliding-window layers; `prefix` names their own fields (MiMo-V2)."""
    key = config.get(f"{prefix}head_dim") or head_dim(config)
    return layers.sliding_window(
        num_layers,
        kv_heads=config[f"{prefix}num_key_value_heads"],
        key_dim=key,
        value_dim=config.get(f"{prefix}v_head_dim") or key,
        element_bytes=element,
        window_tokens=config["sliding_window"],
    )


def _read_plain(config: Config, element: int) -> list[GroupBytes]:
    """Read models with full attention everywhere, with the same window everywhere, or with a list of layers."""
    if "layer_types" in config:
        return _read_layer_types(config, element)
    if config.get("use_cla"):
        raise ConfigError(f"layers of model type {config['model_type']!r} that share KV (use_cla) are not known")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        if config["model_type"] != "mistral":
            raise ConfigError(
                f"sliding windows of model type {config['model_type']!r} without layer_types are not known"
            )
        return [_window(config, config["num_hidden_layers"], element)]
    return [_attention(config, config["num_hidden_layers"], element)]


def _read_latent(config: Config, element: int) -> list[GroupBytes]:
    """Read DeepSeek V2 to V3.2, Kimi K2 and GLM-5. Sparse attention adds an indexer to layers that select tokens."""
    num_layers = config["num_hidden_layers"]
    groups = [_attention(config, num_layers, element)]
    if config.get("index_head_dim"):
        kinds = config.get("indexer_types") or ["full"] * num_layers
        groups.append(layers.indexer(kinds.count("full"), key_dim=config["index_head_dim"]))
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
        element_bytes=_state_bytes(config, default=_own_dtype(config)),
        conv_channels=2 * keys + values,
        conv_kernel=config["linear_conv_kernel_dim"],
    )


def _read_layer_types(config: Config, element: int) -> list[GroupBytes]:
    """Read models that name each layer's kind."""
    return _by_kind(config, list(config["layer_types"]), element)


def _by_kind(config: Config, kinds: Sequence[str], element: int) -> list[GroupBytes]:
    """Return one group for each kind of layer.

    Raises:
        ConfigError: a kind is unknown.
    """
    readers: dict[str, Callable[[int], GroupBytes]] = {
        "full_attention": lambda count: _attention(config, count, element),
        "attention": lambda count: _attention(config, count, element),
        "sliding_attention": lambda count: _window(config, count, element),
        "linear_attention": lambda count: _gated_delta_net(config, count),
        "mamba": lambda count: _mamba2(config, count),
        "conv": lambda count: _short_convolution(config, count),
    }
    unknown = sorted(set(kinds) - set(readers))
    if unknown:
        raise ConfigError(f"layer kind {unknown[0]!r} is not known; it is not guessed")
    return [read(kinds.count(kind)) for kind, read in readers.items() if kind in kinds]


def _read_qwen_next(config: Config, element: int) -> list[GroupBytes]:
    """Read Qwen3-Next and Qwen3.5. Without layer_types, the last of each group of layers is full attention."""
    if "layer_types" in config:
        return _read_layer_types(config, element)
    count, interval = config["num_hidden_layers"], config["full_attention_interval"]
    kinds = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    return _by_kind(config, kinds, element)


def _read_llama4(config: Config, element: int) -> list[GroupBytes]:
    """Read Llama 4. Layers without rotary embedding attend to everything, the others within a chunk.

    A chunk is counted as a window of its length, which is the most that a request holds.
    """
    count = config["num_hidden_layers"]
    local = config.get("no_rope_layers") or [(index + 1) % config["no_rope_layer_interval"] for index in range(count)]
    num_full = sum(not is_local for is_local in local)
    chunked = {**config, "sliding_window": config["attention_chunk_size"]}
    return [_attention(config, num_full, element), _window(chunked, count - num_full, element)]


def _read_gemma_shared(config: Config, element: int) -> list[GroupBytes]:
    """Read Gemma 3n and 4, whose last layers use the KV of earlier ones. Full layers of Gemma 4 have their own heads."""
    kinds = _gemma_kinds(config)
    kinds = kinds[: len(kinds) - (config.get("num_kv_shared_layers") or 0)]
    wide = dict(config)
    wide["head_dim"] = config.get("global_head_dim") or config["head_dim"]
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = config["num_global_key_value_heads"]
    full, window = kinds.count("full_attention"), kinds.count("sliding_attention")
    return [_attention(wide, full, element), _window(config, window, element)]


def _gemma_kinds(config: Config) -> list[str]:
    """Return the kind of each layer; by default every fifth or sixth is full attention."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    period, count = config["sliding_window_pattern"], config["num_hidden_layers"]
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)]


def _read_mimo(config: Config, element: int) -> list[GroupBytes]:
    """Read MiMo-V2: 1 in the pattern is a sliding window, with its own fields for heads."""
    pattern = config["hybrid_layer_pattern"]
    return [_attention(config, pattern.count(0), element), _window(config, pattern.count(1), element, prefix="swa_")]


def _read_gemma3(config: Config, element: int) -> list[GroupBytes]:
    return _by_kind(config, _gemma_kinds(config), element)


_NEMOTRON_ATTENTION = {"*", "attention", "full_attention"}
_NEMOTRON_MAMBA = {"M", "mamba", "linear_attention"}
_NEMOTRON_CACHELESS = {"E", "-", "moe", "mlp"}


def _mamba2(config: Config, num_layers: int) -> GroupBytes:
    """Return Mamba-2 layers: a state per head, a convolution over the inner width and each group's two projections."""
    heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
    dim = config.get("mamba_head_dim") or config.get("mamba_d_head")
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    inner = heads * dim if isinstance(dim, int) else inner
    state = config.get("ssm_state_size") or config["mamba_d_state"]
    groups = config.get("n_groups") or config["mamba_n_groups"]
    default = "float32" if config["model_type"] == "nemotron_h" else _own_dtype(config)
    return layers.linear_state(
        num_layers,
        elements=inner * state,
        element_bytes=_state_bytes(config, default=default),
        conv_channels=inner + 2 * groups * state,
        conv_kernel=config.get("conv_kernel") or config["mamba_d_conv"],
    )


def _read_jamba(config: Config, element: int) -> list[GroupBytes]:
    """Read Jamba: one layer of each period is attention, the rest Mamba-1."""
    count, period, offset = config["num_hidden_layers"], config["attn_layer_period"], config["attn_layer_offset"]
    num_full = sum(index % period == offset for index in range(count))
    inner = config["mamba_expand"] * config["hidden_size"]
    mamba = layers.linear_state(
        count - num_full,
        elements=inner * config["mamba_d_state"],
        element_bytes=_state_bytes(config, default=_own_dtype(config)),
        conv_channels=inner,
        conv_kernel=config["mamba_d_conv"],
    )
    return [_attention(config, num_full, element), mamba]


def _read_bamba(config: Config, element: int) -> list[GroupBytes]:
    """Read Bamba, which numbers its attention layers."""
    count, num_full = config["num_hidden_layers"], len(config["attn_layer_indices"])
    return [_attention(config, num_full, element), _mamba2(config, count - num_full)]


def _read_falcon_h1(config: Config, element: int) -> list[GroupBytes]:
    """Read Falcon-H1: each layer has attention and Mamba-2 side by side."""
    count = config["num_hidden_layers"]
    return [_attention(config, count, element), _mamba2(config, count)]


def _short_convolution(config: Config, num_layers: int) -> GroupBytes:
    """Return layers of LFM2 that keep the last inputs of a convolution and nothing else."""
    return layers.linear_state(
        num_layers,
        elements=0,
        element_bytes=0,
        conv_channels=config["hidden_size"],
        conv_kernel=config["conv_L_cache"],
    )


def _read_lfm2(config: Config, element: int) -> list[GroupBytes]:
    """Read LFM2, which lists the kind of each layer, or numbers its attention layers."""
    if "full_attn_idxs" not in config:
        return _read_layer_types(config, element)
    num_full = len(config["full_attn_idxs"])
    rest = config["num_hidden_layers"] - num_full
    return [_attention(config, num_full, element), _short_convolution(config, rest)]


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
    dim = head_dim(config)
    return layers.linear_state(
        num_layers, elements=heads * dim * dim, element_bytes=_state_bytes(config), conv_channels=0, conv_kernel=0
    )


def _read_ring(config: Config, element: int) -> list[GroupBytes]:
    """Read Ring and Ling 2.0 and 2.5: in each group of layers the last is full attention, the rest lightning attention."""
    linear_heads = config.get("num_kv_heads_for_linear_attn", config["num_attention_heads"])
    if not linear_heads or "kda_lower_bound" in config:
        raise ConfigError(f"KDA layers of model type {config['model_type']!r} are not known; they are not guessed")
    num_layers = config["num_hidden_layers"]
    num_full = num_layers // config["layer_group_size"]
    linear = _lightning(config, num_layers - num_full, linear_heads)
    return [_attention(config, num_full, element), linear]


def _read_minimax_text(config: Config, element: int) -> list[GroupBytes]:
    """Read MiniMax-Text-01 and M1: 1 is full attention, 0 lightning attention; or the kinds by name."""
    kinds = config.get("attn_type_list") or [int(kind == "full_attention") for kind in config["layer_types"]]
    linear = _lightning(config, kinds.count(0), config["num_attention_heads"])
    return [_attention(config, kinds.count(1), element), linear]


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
Reader = Callable[[Config, int], list[GroupBytes]]
# Readers by model type. Types that are not listed are refused.
_FAMILIES: Mapping[str, Reader] = MappingProxyType({
    **dict.fromkeys(_PLAIN, _read_plain),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"), _read_latent),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _read_qwen_next),
    **dict.fromkeys(("minimax_text_01", "minimax", "minimax_m1"), _read_minimax_text),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v2_5"), _read_ring),
    **dict.fromkeys(("gemma3", "gemma3_text"), _read_gemma3),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _read_gemma_shared),
    **dict.fromkeys(("llama4", "llama4_text"), _read_llama4),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _read_lfm2),
    "kimi_linear": _read_kimi,
    "mimo_v2_flash": _read_mimo,
    "nemotron_h": _read_nemotron,
    "granitemoehybrid": _read_layer_types,
    "bamba": _read_bamba,
    "falcon_h1": _read_falcon_h1,
    "jamba": _read_jamba,
})  # fmt: skip

"""Kind of each layer of a model, from any of the fields by which published config.json files tell it."""

from collections.abc import Mapping
from typing import Any, Literal

from prfaas.errors import ConfigError

Config = Mapping[str, Any]
LayerKind = Literal["full", "window", "linear", "experts", "dense"]

# Layers of the last two kinds have no attention (Nemotron-H).
_WORDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "*": "full",
    "sliding_attention": "window",
    "linear_attention": "linear",
    "mamba": "linear",
    "M": "linear",
    "conv": "linear",
    "moe": "experts",
    "E": "experts",
    "mlp": "dense",
    "-": "dense",
}


def layer_kinds(config: Config, *, may_be_uniform: bool = True) -> list[LayerKind]:
    """Return the kind of each layer. A config that tells nothing has layers of one kind, if that may be.

    Raises:
        ConfigError: a kind is unknown, or the config tells nothing.
        KeyError: a field is missing.
    """
    if config.get("use_cla"):
        raise ConfigError(f"layers of model type {config['model_type']!r} that share KV (use_cla) are not known")
    kinds = _listed(config) or _periodic(config)
    if not kinds and not may_be_uniform:
        raise ConfigError(f"model type {config['model_type']!r}: config.json does not tell the kinds of the layers")
    return kinds or [_only_kind(config)] * config["num_hidden_layers"]


def _listed(config: Config) -> list[LayerKind] | None:
    """Return the kinds of a config that lists them for each layer, by word or by number."""
    linear = config.get("linear_attn_config")
    if linear:  # Kimi Linear.
        num_full = len(linear["full_attn_layers"])
        return ["full" if index < num_full else "linear" for index in range(num_full + len(linear["kda_layers"]))]
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2.
        if config.get(name):
            return ["full" if index in config[name] else "linear" for index in range(config["num_hidden_layers"])]
    if config.get("hybrid_layer_pattern"):  # MiMo-V2.
        return ["window" if is_window else "full" for is_window in config["hybrid_layer_pattern"]]
    if config.get("attn_type_list"):  # MiniMax-Text-01 and M1.
        return ["full" if is_full else "linear" for is_full in config["attn_type_list"]]
    if "attention_chunk_size" in config and config.get("no_rope_layers"):  # Llama 4.
        return ["window" if is_local else "full" for is_local in config["no_rope_layers"]]
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    words = next((config[name] for name in names if config.get(name)), ())
    unknown = sorted(set(words) - set(_WORDS))
    if unknown:
        raise ConfigError(f"layer kind {unknown[0]!r} is not known; it is not guessed")
    return [_WORDS[word] for word in words]


def _periodic(config: Config) -> list[LayerKind] | None:
    """Return the kinds of a config that gives the period of full attention."""
    count = config["num_hidden_layers"]
    if config.get("attn_layer_period"):  # Jamba.
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        return ["full" if index % period == offset else "linear" for index in range(count)]
    rest: LayerKind = "linear"  # Qwen3-Next; Ring and Ling.
    period = config.get("full_attention_interval") or config.get("layer_group_size")
    if not period:
        rest = "window"  # Gemma; Llama 4.
        period = config.get("sliding_window_pattern") or config.get("no_rope_layer_interval")
    return [rest if (index + 1) % period else "full" for index in range(count)] if period else None


def _only_kind(config: Config) -> LayerKind:
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return "full"
    if config["model_type"] != "mistral":
        raise ConfigError(f"sliding windows of model type {config['model_type']!r} without layer_types are not known")
    return "window"
